"""Which checkpoints of a run stay, and what killed writers left."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.checkpoint import folder as run_folder
from hpcllm.checkpoint.folder import Found, Retention, file_name, newest_first, step_of, superseded, sweep
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import whole
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import CheckpointConfig


def rule(keep: int = 2, every_steps: int = 0, best: int = 0) -> CheckpointConfig:
    return CheckpointConfig(keep=keep, keep_every_steps=every_steps, keep_best=best)


def test_every_folder_keeps_what_it_should():
    """Random folders: what goes, and in which order, is what the rules say one by one."""
    rng = np.random.default_rng(3)
    for _ in range(500):
        steps = sorted(rng.choice(40, rng.integers(0, 12), replace=False).tolist(), reverse=True)
        sound = {step: bool(rng.random() < 0.8) for step in steps}
        loss = {step: float(rng.integers(5)) if rng.random() < 0.6 else math.inf for step in steps}
        keep = rule(int(rng.integers(1, 5)), int(rng.integers(0, 4)) * 3, int(rng.integers(0, 4)))
        paths = [Path(file_name(step)) for step in steps]
        gone = superseded(paths, lambda path, s=sound, v=loss: Found(path, s[step_of(path)], v[step_of(path)]), keep)
        gone_steps = [step_of(path) for path in gone]
        left = [step for step in steps if step not in gone_steps]
        assert gone_steps == sorted(gone_steps)
        newest = [step for step in steps if sound[step]][: keep.keep]
        assert set(newest) <= set(left)
        if len(newest) < keep.keep:
            assert not gone
            continue
        scored = sorted((loss[step], -step) for step in steps if sound[step] and loss[step] < math.inf)
        best = {-negative for _, negative in scored[: keep.keep_best]}
        for_ever = {step for step in steps if keep.keep_every_steps and step % keep.keep_every_steps == 0}
        assert set(left) == {step for step in steps if step >= newest[-1]} | best | for_ever


def test_files_are_opened_only_where_the_rules_ask():
    opened = []

    def look(path: Path) -> Found:
        opened.append(step_of(path))
        return Found(path, sound=True)

    paths = [Path(file_name(step)) for step in range(100, 0, -1)]
    assert len(superseded(paths, look, rule(keep=2, every_steps=10))) == 89
    assert opened == [100, 99]


def scored(path: Path, loss: float) -> None:
    """A checkpoint of one number that says what its validation loss was."""
    slab, spec = whole("x", (1,)), DatasetSpec((1,), "float32")
    plan = prepare(MPI.COMM_SELF, {"x": spec}, [slab])
    write(path, MPI.COMM_SELF, plan, lambda _: np.zeros(1, np.float32), {"run/validation_loss": loss})


def test_the_best_stay_with_the_newest(tmp_path):
    for step, loss in enumerate([3.1, 2.7, 2.9, 2.8, 3.0, math.nan, 3.2], start=1):
        scored(tmp_path / file_name(step), loss)
    Retention(tmp_path).tidy(rule(keep=2, best=2))
    assert [step_of(path) for path in newest_first(tmp_path)] == [7, 6, 4, 2]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_stay(tmp_path, write_alone, keep):
    paths = {step: write_alone(tmp_path / file_name(step)) for step in (1, 2, 3, 4)}
    assert Retention(tmp_path).tidy(rule(keep)) == ""
    assert newest_first(tmp_path) == [paths[step] for step in range(4, max(0, 4 - keep), -1)]


def test_what_cannot_be_deleted_is_said(tmp_path, write_alone):
    for step in (1, 2):
        write_alone(tmp_path / file_name(step))
    (tmp_path / file_name(0)).mkdir()
    said = Retention(tmp_path).tidy(rule(1))
    assert "cannot delete" in said
    assert file_name(0) in said
    assert (tmp_path / file_name(2)).exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newest_does_not_cost_the_last_sound_one(tmp_path, write_alone, keep):
    paths = {step: write_alone(tmp_path / file_name(step)) for step in (1, 2, 3)}
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    Retention(tmp_path).tidy(rule(keep))
    assert paths[2].exists()
    assert paths[1].exists() == (keep == 2)


def test_a_file_is_looked_into_again_only_when_it_has_changed(tmp_path, write_alone, monkeypatch):
    opened = []
    opens = run_folder.Checkpoint.open
    monkeypatch.setattr(run_folder.Checkpoint, "open", lambda path: (opened.append(path), opens(path))[1])
    path, folder = write_alone(tmp_path / file_name(1)), Retention(tmp_path)
    assert folder.look(path).sound
    assert folder.look(path).sound
    assert opened == [path]
    path.write_bytes(path.read_bytes()[:-1])
    assert not folder.look(path).sound


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
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(stays)
