"""Which checkpoints of a run are found, kept and swept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcllm.checkpoint.folder import file_name, keep_newest, newest_first, newest_valid, step_of
from hpcllm.errors import CheckpointError


def fill(folder, write_alone, steps):
    return {step: write_alone(folder / file_name(step)) for step in steps}


def spoil(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("step", [0, 1, 1000, 99_999_999, 123_456_789_012])
def test_a_step_comes_back_from_its_name(tmp_path, step):
    assert step_of(tmp_path / file_name(step)) == step


@pytest.mark.parametrize(
    "name", ["step_1.h5", "step_00000001.h5.tmp-a-1-00000000", "xstep_00000001.h5", "step_00000001"]
)
def test_other_names_are_no_checkpoints(tmp_path, name):
    (tmp_path / name).touch()
    assert step_of(tmp_path / name) is None
    assert newest_first(tmp_path) == []


def found_in(folder: Path) -> tuple[Path | None, list[str]]:
    checkpoint, passed_over = newest_valid(folder)
    if checkpoint is None:
        return None, passed_over
    with checkpoint:
        return checkpoint.path, passed_over


def test_the_newest_is_by_step_and_not_by_time_or_letters(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [100_000_000, 99_999_999, 5])
    assert found_in(tmp_path) == (paths[100_000_000], [])


def test_no_folder_and_no_checkpoint_are_no_error(tmp_path):
    assert found_in(tmp_path / "none") == (None, [])
    assert found_in(tmp_path) == (None, [])
    assert keep_newest(tmp_path, 1) == []


def test_damaged_ones_are_passed_over_and_named(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1, 2, 3, 4])
    for step in (2, 4):
        spoil(paths[step])
    found, passed_over = found_in(tmp_path)
    assert found == paths[3]
    assert [line.split()[0] for line in passed_over] == [paths[4].name]
    for step in (1, 3):
        spoil(paths[step])
    found, passed_over = found_in(tmp_path)
    assert found is None
    assert len(passed_over) == 4


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_stay(tmp_path, write_alone, keep):
    paths = fill(tmp_path, write_alone, [1, 2, 3, 4])
    assert keep_newest(tmp_path, keep) == [paths[step] for step in range(1, 5 - keep)]
    assert newest_first(tmp_path) == [paths[step] for step in range(4, max(0, 4 - keep), -1)]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_does_not_cost_the_last_sound_one(tmp_path, write_alone, keep):
    paths = fill(tmp_path, write_alone, [1, 2, 3])
    spoil(paths[3])
    keep_newest(tmp_path, keep)
    assert found_in(tmp_path)[0] == paths[2]
    assert paths[1].exists() == (keep == 2)


def test_to_keep_none_is_refused(tmp_path, write_alone):
    paths = fill(tmp_path, write_alone, [1])
    with pytest.raises(CheckpointError, match="keep = 0"):
        keep_newest(tmp_path, 0)
    assert paths[1].exists()


def test_only_what_dead_writers_left_is_swept(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    host, here = socket.gethostname(), f"step_00000001.h5.tmp-{socket.gethostname()}"
    swept = [f"{here}-{ended.pid}-0123abcd", "step_00000002.h5.tmp-far-7-0123abcd"]
    stays = [
        f"{here}-{os.getpid()}-0123abcd",  # at work
        "step_00000001.h5.tmp-far-7-0123abcd",  # perhaps at work, on another node
        f"step_00000001.h5.tmp-{host}-{ended.pid}",  # not a name of ours
        f"notes.tmp-{host}-{ended.pid}-0123abcd",
    ]
    for name in [*swept, *stays]:
        (tmp_path / name).touch()
    os.utime(tmp_path / swept[1], (0, 0))
    keep_newest(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(stays)
