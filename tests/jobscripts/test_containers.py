"""The two container files make the same image, and what they run installs hpcllm beside a PyTorch that is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers"
DOCKER = (FOLDER / "Dockerfile").read_text()
APPTAINER = (FOLDER / "hpcllm.def").read_text()


def section(name: str) -> list[str]:
    """The lines of a section of the definition file."""
    (body,) = re.findall(rf"^%{name}\n((?: .*\n|\n)+)", APPTAINER, re.MULTILINE)
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_both_files_bring_the_same_and_do_the_same():
    copied = {tuple(line.split()[1:]) for line in DOCKER.splitlines() if line.startswith("COPY ")}
    docker = {(name, target) for *names, target in copied for name in names}
    assert docker == {tuple(line.split()) for line in section("files")}
    assert all((ROOT / name).exists() for name, _ in docker)
    assert re.findall(r"^RUN (.*)", DOCKER, re.MULTILINE) == section("post")[-1:]
    assert [f"export {line}" for line in re.findall(r"^ENV (.*)", DOCKER, re.MULTILINE)] == section("environment")
    (base,) = re.findall(r"^ARG (BASE=.*)", DOCKER, re.MULTILINE)
    assert base in section("arguments")
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == {name for name, _ in docker}


def test_what_a_definition_file_runs_is_a_script():
    for name in ("post", "environment", "runscript", "test"):
        done = subprocess.run(["sh", "-n"], input="\n".join(section(name)), text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_the_dockerfile_has_no_fault_that_hadolint_knows():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.full(reason="installs the package anew, half a minute of work")
def test_an_install_leaves_the_pytorch_of_the_image_as_it_is(tmp_path):
    """This environment is the image's: everything but hpcllm is there, so nothing is fetched."""
    source, target = tmp_path / "the source", tmp_path / "the target"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in ("hpcllm", "jobscripts/common", "jobscripts/local"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_INDEX": "1",
    }
    command = ["bash", FOLDER / "install.sh", source, target]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = target.glob("lib/python*/site-packages")
    assert (site / "hpcllm/__init__.py").exists()
    assert not (site / "torch").exists()
    assert done.stdout.splitlines()[-1].startswith("hpcllm ")
