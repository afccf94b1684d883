"""The module files under a real Lmod and a real environment-modules; tests/modules/run.sh says where they are.

    a clone, its folder's name with a space:   modulefiles/hpcllm/VERSION{,.lua}   .venv -> the environment of the tests
    a shell that knows nothing:               . init/bash; module use ...; module load hpcllm; hpcllm --version

Each test runs with Lmod, which takes the Lua file, and with environment-modules, which takes the Tcl one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hpcllm

REPOSITORY = Path(__file__).parents[2]
INITS = {
    "lmod": os.environ.get("HPCLLM_LMOD", ""),
    "environment-modules": os.environ.get("HPCLLM_MODULES", ""),
}

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=INITS)
def system(request) -> str:
    if not INITS[request.param]:
        pytest.skip(f"{request.param}: not installed")
    return str(request.param)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / "my clone"
    shutil.copytree(REPOSITORY / "modulefiles", clone / "modulefiles")
    (clone / ".venv").symlink_to(sys.prefix)
    return clone


@pytest.fixture
def shell(system: str, clone: Path, tmp_path: Path) -> Shell:
    """Run lines in a new bash that has read the init file and used the clone's modules."""

    def run(lines: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        init = f'. "{INITS[system]}"\nmodule use "$CLONE/modulefiles"\n'
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CLONE": str(clone)} | variables
        command = ["bash", *(options or ("--norc",)), "-c", init + lines]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    return run


def values(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the shell printed as NAME=VALUE."""
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_there_is_a_file_of_each_kind_for_this_version() -> None:
    names = sorted(path.name for path in (REPOSITORY / "modulefiles/hpcllm").iterdir())
    assert names == [hpcllm.__version__, f"{hpcllm.__version__}.lua"]


@pytest.mark.parametrize("options", [("--norc",), ("-l",), ("--norc", "-u"), ("--norc", "-e")])
def test_load_gives_the_command_and_its_place(shell: Shell, clone: Path, options: tuple[str, ...]) -> None:
    done = shell('module load hpcllm\necho "root=$HPCLLM_ROOT"\ncommand -v hpcllm\nhpcllm --version', *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-3:] == [f"root={clone}", f"{clone}/.venv/bin/hpcllm", f"hpcllm {hpcllm.__version__}"]


def test_help_of_the_command(shell: Shell) -> None:
    done = shell("module load hpcllm && hpcllm --help")
    assert done.returncode == 0
    assert "train" in done.stdout


def test_unload_gives_everything_back(shell: Shell) -> None:
    show = 'echo "path=$PATH"; echo "root=${HPCLLM_ROOT-none}"; echo "prefix=${HPCLLM_PREFIX-none}"\n'
    done = shell("module load hpcllm\nmodule unload hpcllm\n" + show)
    assert values(done) == {"path": "/usr/bin:/bin", "root": "none", "prefix": "none"}
    done = shell("module load hpcllm\nmodule unload hpcllm\n" + show, HPCLLM_ROOT="mine")
    assert values(done)["root"] == "mine"


def test_unload_after_another_environment_was_named(shell: Shell) -> None:
    done = shell('module load hpcllm\nexport HPCLLM_VENV=/nowhere\nmodule unload hpcllm\necho "path=$PATH"')
    assert values(done)["path"] == "/usr/bin:/bin"


def test_loading_twice_is_loading_once(shell: Shell, clone: Path) -> None:
    done = shell('module load hpcllm\nmodule load hpcllm\necho "path=$PATH"\n')
    assert values(done)["path"] == f"{clone}/.venv/bin:/usr/bin:/bin"


def test_help_and_whatis(shell: Shell, clone: Path) -> None:
    text = shell("module help hpcllm; module whatis hpcllm; module show hpcllm")
    said = text.stdout + text.stderr
    for part in ("native to MPI", hpcllm.__version__, "preflight RUN.toml", "HPCLLM_MPI", f"{clone}/.venv"):
        assert part in said


def test_not_installed_is_refused_with_what_to_do(shell: Shell, clone: Path) -> None:
    (clone / ".venv").unlink()
    done = shell("module load hpcllm; echo code=$?; echo path=$PATH; echo root=${HPCLLM_ROOT-none}")
    assert values(done) == {"code": "1", "path": "/usr/bin:/bin", "root": "none"}
    said = " ".join(done.stderr.split())  # Lmod breaks long lines
    assert "is not installed in" in said
    assert f"bash '{clone}/jobscripts/local/setup.sh'" in said
    assert shell("module help hpcllm").returncode == 0  # which does not need it


def test_half_installed_is_not_installed(shell: Shell, clone: Path) -> None:
    (clone / ".venv").unlink()
    (clone / ".venv/bin").mkdir(parents=True)
    for name in ("bin/hpcllm", "unfinished"):
        (clone / ".venv" / name).touch()
    assert shell("module load hpcllm").returncode == 1


@pytest.mark.parametrize(
    ("name", "value", "folder"), [("HPCLLM_MPI", "openmpi", ".venv-openmpi"), ("HPCLLM_VENV", "{}", "own")]
)
def test_another_environment(shell: Shell, clone: Path, name: str, value: str, folder: str) -> None:
    (clone / folder).symlink_to(sys.prefix)
    done = shell("module load hpcllm\ncommand -v hpcllm", **{name: value.format(clone / folder)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{clone / folder}/bin/hpcllm"
