"""Whatever has happened to the logs, traces and job files of a run, it goes on from its newest sound checkpoint."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hostile_logs import REPLACE, begun, goes_on, mutants
from mpi4py import MPI

MUTANTS = 40


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
