"""Laws of text files that a user names: nothing but a regular file of a stated size is read, and nothing is waited for.

Each way to read one: run file, machine file, schedule, trace, results, tuning file, the log of a report.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from hpcllm.checkpoint.directory import open_regular as open_checkpoint
from hpcllm.checkpoint.folder import locate
from hpcllm.checkpoint.huggingface.start import model_of
from hpcllm.cli.options import file_or_folder
from hpcllm.collectives.tuning import load_tuning
from hpcllm.config import machines, schema
from hpcllm.config.input_files import LARGEST_SETTINGS_BYTES, fault_of, read_text
from hpcllm.config.schema import Config, PipelineConfig
from hpcllm.errors import HpcllmError, UserError
from hpcllm.pipeline.measured import read_trace
from hpcllm.plan.resolve import schedule_file_text
from hpcllm.plan.time.calibration import machine_text
from hpcllm.report.run_folder import read_runs
from hpcllm.system.output import check_writable
from hpcllm.training.run_lock import check_lockable


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


MADE: dict[str, Callable[[Path], None]] = {
    "pipe": make_fifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "sparse": make_sparse,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe" * 100) and None,
    "nothing": lambda _: None,
}
READ: dict[str, Callable[[Path], object]] = {
    "run file": schema.load,
    "machine file": lambda path: machines.load(str(path)),
    "schedule": lambda path: schedule_file_text(Config(pipeline=PipelineConfig(schedule="custom", file=str(path)))),
    "trace": read_trace,
    "results": lambda path: machine_text([path]),
    "tuning": load_tuning,
}
LOOKED_AT: dict[str, Callable[[Path], object]] = {
    "argument": lambda path: file_or_folder(str(path)),
    "output": check_writable,
    "run folder": check_lockable,
    "checkpoint": locate,
    "beginning": model_of,
}


@pytest.mark.parametrize("reads", READ)
@pytest.mark.parametrize("made", [*MADE, "long name"])
def test_only_regular_files_of_a_stated_size_are_read(tmp_path, made, reads):
    path = tmp_path / ("a b.toml" if made != "long name" else "x" * 300)
    MADE.get(made, MADE["nothing"])(path)
    with pytest.raises(UserError) as refused:
        READ[reads](path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("made", ["pipe", "endless", "folder", "loop"])
def test_a_log_that_is_no_file_is_no_run(tmp_path, made):
    MADE[made](tmp_path / "log.jsonl")
    with pytest.raises(UserError):
        read_runs([tmp_path])


@pytest.mark.parametrize("made", ["pipe", "endless", "folder", "loop", "nothing"])
def test_a_checkpoint_is_a_regular_file(tmp_path, made):
    MADE[made](tmp_path / "step_00000001.h5")
    with pytest.raises(HpcllmError):
        open_checkpoint(tmp_path / "step_00000001.h5")


def test_the_largest_file_that_is_read_whole(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("#" * LARGEST_SETTINGS_BYTES)
    assert len(read_text(path)) == LARGEST_SETTINGS_BYTES
    path.write_text("#" * (LARGEST_SETTINGS_BYTES + 1))
    with pytest.raises(ValueError, match="more than 4 MiB"):
        read_text(path)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Act as a user without rights; root may look everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop", "shut/in"])
@pytest.mark.parametrize("looks", LOOKED_AT)
def test_what_nobody_can_look_at_is_said_in_one_line(tmp_path, monkeypatch, name, looks):
    monkeypatch.chdir(tmp_path)  # relative names: whoever is not root may not look into pytest's folders
    Path("loop").symlink_to("loop")
    Path("shut").mkdir(mode=0o000)
    with as_nobody() if name == "shut/in" else nullcontext():
        assert fault_of(name)
        with pytest.raises((UserError, argparse.ArgumentTypeError)) as refused:
            LOOKED_AT[looks](Path(name))
    assert "\n" not in str(refused.value)


def test_where_nothing_is_there_is_no_fault(tmp_path):
    (tmp_path / "file").touch()
    assert [fault_of(tmp_path / name) for name in ("file", "none", "file/none", ".")] == [""] * 4
