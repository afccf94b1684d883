"""Disks that are full, read-only or gone, as they really are: small file systems that these tests mount.

Skipped where mounting is not allowed. The run says path and cause, keeps the checkpoint it had, and the next start
goes on from it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomli_w
from mpi4py import MPI
from small_runs import store

from hpcllm.checkpoint import file_layout
from hpcllm.config.schema import to_tables
from hpcllm.errors import CheckpointError, HpcllmError
from hpcllm.training import loop as train_module
from tests.system.test_job import environment, launcher
from tests.training.test_saving import contents, folder_of, records, run, run_config

ONE = MPI.COMM_SELF
LIMIT_S = 120.0


def mount(*arguments: str) -> bool:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MB; store() is somewhere else."""
    folder = tmp_path / "a small disk"
    folder.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", "size=4m", "none", str(folder)):
        pytest.skip("only root may mount a file system, and not in every container")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(folder: Path, left: int) -> None:
    """Leave about so many bytes free."""
    stat = os.statvfs(folder)
    (folder / "filling").write_bytes(b"\1" * max(0, stat.f_bavail * stat.f_frsize - left))


def at_step_five(monkeypatch, act) -> None:
    """Do something in the middle of step 5, the checkpoint of step 3 being whole."""

    def forward_backward(run, number, position, real=train_module.forward_backward):
        if number + 1 == 5:
            while os.listdir(run.run_folder / "checkpoints") != ["step_00000003.h5"]:
                time.sleep(0.001)
            act()
        return real(run, number, position)

    monkeypatch.setattr(train_module, "forward_backward", forward_backward)


def ends_and_goes_on(config, monkeypatch, fix, match: str) -> None:
    """The run ends with an error of that text and keeps step 3; once fixed, it ends as one that never failed."""
    with pytest.raises(CheckpointError, match=match) as caught:
        run(config, ONE)
    assert caught.value.exit_code == 1
    assert os.listdir(folder_of(config) / "checkpoints") == ["step_00000003.h5"]
    monkeypatch.undo()
    fix()
    run(config, ONE)
    straight = run_straight()
    assert records(config, "loss") == records(straight, "loss")
    assert contents(config) == contents(straight)


@cache
def run_straight():
    """A run that never failed."""
    config = run_config(store().parent, "straight")
    run(config, ONE)
    return config


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("checked", [True, False], ids=["seen before", "full on the way"])
def test_a_full_disk(small_disk, monkeypatch, asynchronous, checked):
    config = run_config(small_disk, checkpoint={"asynchronous": asynchronous})
    at_step_five(monkeypatch, lambda: fill(small_disk, 100_000))
    if not checked:  # somebody else fills it while we write
        monkeypatch.setattr(file_layout, "check_space", lambda *_: None)
    cause = "bytes free, but the checkpoint needs" if checked else r"step_00000006\.h5.*No space left on device"
    ends_and_goes_on(config, monkeypatch, (small_disk / "filling").unlink, re.escape(str(small_disk)) + ".*" + cause)


def test_a_folder_that_is_read_only(small_disk, monkeypatch):
    config = run_config(small_disk)
    place = str(folder_of(config) / "checkpoints")

    def close() -> None:
        assert mount("--bind", place, place)
        assert mount("-o", "remount,ro,bind", place)

    at_step_five(monkeypatch, close)
    ends_and_goes_on(
        config, monkeypatch, lambda: subprocess.run(["umount", place], check=True), "Read-only file system"
    )


def test_a_folder_that_is_gone(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    aside = tmp_path / "elsewhere"
    at_step_five(monkeypatch, lambda: folder_of(config).rename(aside))
    with pytest.raises(HpcllmError, match=r"the run folder is gone from under this job|No such file"):
        run(config, ONE)
    assert not folder_of(config).exists()
    monkeypatch.undo()
    aside.rename(folder_of(config))
    assert run(config, ONE).step == 8


@pytest.mark.full(reason="jobs on a file system of their own; a quarter of a minute", in_ci=True)
def test_a_job_on_a_full_disk_ends_with_one_line_and_exit_code_one(small_disk):
    config = run_config(small_disk, steps=40)
    path = store().parent / f"full {os.getpid()}.toml"
    path.write_text(tomli_w.dumps(to_tables(config)))
    command = [*launcher(2), sys.executable, "-m", "hpcllm", "train", str(path)]
    with_keys = [*command, "--set", "mesh.dp=2", "--set", "checkpoint.keep=99"]
    done = subprocess.run(
        with_keys, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpcllm: error: ")]
    assert len(lines) == 1
    assert "bytes free, but the checkpoint needs" in lines[0] or "No space left" in lines[0]
    assert str(small_disk) in lines[0]
    names = os.listdir(folder_of(config) / "checkpoints")
    assert names
    assert all(name.endswith(".h5") for name in names)
    assert shutil.disk_usage(small_disk).free < 2_000_000
