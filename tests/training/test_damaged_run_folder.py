"""Whatever has happened to the logs, traces and job files of a run, it goes on from its newest sound checkpoint."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

import pytest
from hostile_logs import LIMIT_S, REPLACE, Damage, mutants, within
from mpi4py import MPI
from small_runs import tiny

from hpcllm.config.schema import Config
from hpcllm.report.run_folder import read_log
from hpcllm.system.job import StopSignals
from hpcllm.training.finished import read_progress
from hpcllm.training.loop import train

FIRST, LAST = 2, 3
MUTANTS = 40


def config_of(parent: Path, steps: int) -> Config:
    return tiny(
        run={"folder": str(parent), "steps": steps},
        checkpoint={"every_steps": 1},
        data={"validation_sequences": 2},
        log={"every_steps": 1, "trackers": ["tensorboard"], "trace_steps": [steps], "validation_every_steps": 0},
    )


def begun(parent: Path) -> Path:
    """Make a run that has made its first steps; returns its folder's parent."""
    made(parent / "sound", FIRST, MPI.COMM_SELF)
    return parent / "sound"


def made(parent: Path, steps: int, comm: MPI.Intracomm) -> None:
    with StopSignals() as signals:
        train(config_of(parent, steps), comm, signals)


def goes_on(sound: Path, parent: Path, damage: Damage, comm: MPI.Intracomm) -> None:
    """Damage a copy of a run and let it go on: it makes its last step from the checkpoint, and says so."""
    shutil.copytree(sound, parent)
    damage(parent / "r")
    with within(LIMIT_S):
        made(parent, LAST, comm)
    assert read_progress(parent / "r", LAST).is_finished
    steps = read_log(parent / "r" / "log.jsonl").loss[0]
    assert list(steps)[-1] == LAST


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return begun(tmp_path_factory.mktemp("a run"))


@pytest.mark.parametrize("number", range(MUTANTS))
def test_a_run_goes_on_in_a_damaged_folder(sound, tmp_path, number):
    what, damage = next(islice(mutants(17), number, None))
    print(what)
    goes_on(sound, tmp_path / "a run", damage, MPI.COMM_SELF)


@pytest.mark.parametrize("kind", sorted(set(REPLACE) - {"empty"}))
@pytest.mark.parametrize("name", ["log.jsonl", "job.txt", "ranks.txt", "finished"])
def test_what_is_no_file_is_set_aside_and_said(sound, tmp_path, capfd, name, kind):
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        REPLACE[kind](folder / name)

    goes_on(sound, tmp_path / "a run", damage, MPI.COMM_SELF)
    assert f"so it is now {name}.damaged" in capfd.readouterr().err


def test_a_trace_that_cannot_be_written_is_said_and_the_run_goes_on(sound, tmp_path, capfd):
    goes_on(sound, tmp_path / "a run", lambda folder: (folder / "trace/step_00000003.json").mkdir(), MPI.COMM_SELF)
    assert "trace/step_00000003.json" in capfd.readouterr().out
