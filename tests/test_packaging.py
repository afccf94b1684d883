"""What a package index would show of the project, and what error texts tell pip to install."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import hpcllm
from hpcllm.config import machines
from hpcllm.training import trackers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"


def requirements(extra: str) -> set[str]:
    """The packages of an extra, without their versions."""
    return {re.split(r"[\[<>=]", requirement)[0] for requirement in PROJECT["optional-dependencies"][extra]}


def test_the_metadata_can_be_built_and_says_what_the_project_is(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "hpcllm").mkdir()
    (tmp_path / "hpcllm/__init__.py").write_text((ROOT / "hpcllm/__init__.py").read_text())
    command = [sys.executable, "-W", "error::UserWarning", "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(path.read_text())
    assert (metadata["Name"], metadata["Version"]) == ("hpcllm", hpcllm.__version__)
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# hpcllm")
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    classifiers = metadata.get_all("Classifier")
    assert classifiers == sorted(set(classifiers))
    assert not any(line.startswith("License ::") for line in classifiers)  # there is an expression instead
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in classifiers


def test_advice_to_install_names_packages_of_the_extras():
    """Not the project's own name, which an index need not know: a clone has it by --editable."""
    known = set().union(*map(requirements, PROJECT["optional-dependencies"])) | {"mpi4py"}
    for path in (ROOT / "hpcllm").rglob("*.py"):
        for word in re.findall(r"pip install (?:--\S+ )*([\w{'-][\w-]*)", path.read_text()):
            assert word in known or word.startswith("{PACKAGES"), f"{path}: pip install {word}"


def test_each_tracker_is_an_extra_of_its_package():
    for name, module in trackers.MODULES.items():
        assert requirements(name) == {trackers.PACKAGES[name]}
        assert importlib.util.find_spec(module) is not None or name != "tensorboard"


def test_documents_count_the_machines_as_they_are():
    counted = {"README.md": r"(\d+) machines or your own", "CHANGELOG.md": r"config/machines/`: (\d+) systems"}
    for name, words in counted.items():
        assert re.findall(words, (ROOT / name).read_text()) == [str(len(machines.names()))], name
