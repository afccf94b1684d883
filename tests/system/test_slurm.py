"""What a real Slurm (tests/slurm/jobs.py) cannot be made to say: late, wrong and missing answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcllm.system import slurm
from hpcllm.system.slurm import BatchJob, batch_job, requeue_job, time_left_s


@pytest.fixture
def program(tmp_path, monkeypatch) -> Callable[[str, str], Path]:
    """Put a shell script of that name before all else on PATH; returns the file that its arguments are written to."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(name: str, body: str) -> Path:
        said = tmp_path / f"{name} was asked"
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$*" >> "{said}"\n{body}\n')
        path.chmod(0o755)
        return said

    return make


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("0:00", 0),
        ("59:01", 59 * 60 + 1),
        ("2:00:00", 7200),
        ("1-00:00:01\n", 86401),
        ("10-23:59:59", 11 * 86400 - 1),
        ("UNLIMITED", math.inf),
        ("UNLIMITED\n30:00\n31:00", 1800),  # the parts of a heterogeneous job end together
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
        ("slurm_load_jobs error: Unable to contact slurm controller", None),
    ],
)
def test_the_time_left_is_read_in_all_forms_that_squeue_has(answer, seconds):
    assert time_left_s(answer) == seconds


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
        ({"SLURM_JOB_ID": "13", "SLURM_JOB_ID_HET_GROUP_0": "12", "SLURM_JOB_ID_HET_GROUP_1": "13"}, "12"),
    ],
)
def test_a_job_is_named_as_its_commands_want_it(environment, name):
    job = batch_job(environment)
    assert (job.id, job.restarts, job.end_s) == (name, 0, math.inf)
    assert batch_job(environment | {"SLURM_RESTART_COUNT": "2"}).restarts == 2


def test_outside_of_slurm_there_is_no_job():
    assert batch_job({}) is None
    assert batch_job({"SLURM_JOB_ID": ""}) is None


def test_the_end_that_a_job_is_told_holds_until_squeue_says_another(program):
    job = batch_job({"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert job.end_s - time.monotonic() == pytest.approx(100, abs=2)
    asked = program("squeue", "echo 5:00")
    job.ask_first()
    assert job.end_s - time.monotonic() == pytest.approx(300, abs=2)
    assert asked.read_text() == "--noheader --jobs=12 --format=%L\n"


@pytest.mark.parametrize("body", ["exit 1", "echo no; exit 3", "echo rubbish", "echo down >&2; exit 1"])
def test_a_squeue_that_fails_leaves_what_is_known(program, body):
    program("squeue", body)
    job = BatchJob("12", end_s=1e9)
    job.ask_first()
    assert job.end_s == 1e9
    assert ("squeue: " in job.fault) == ("exit" in body)
    assert ("down" in job.fault) == ("down" in body)


def test_a_squeue_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = BatchJob("12")
    job.ask_first()
    assert job.fault == "squeue: No such file or directory"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert "squeue: No such file" in requeue_job("")


def test_nobody_waits_for_a_late_answer_and_it_counts_when_it_comes(program, tmp_path, monkeypatch):
    asked = program("squeue", f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.05; done; echo 10:00')
    monkeypatch.setattr(slurm, "START_LIMIT_S", 0.2)
    job = BatchJob("12")
    start_s = time.monotonic()
    job.ask_first()
    for _ in range(100):
        job.refresh(0.0)
    assert time.monotonic() - start_s < 2
    assert job.end_s == math.inf
    (tmp_path / "go").touch()
    while job.end_s == math.inf:
        assert time.monotonic() - start_s < 20
        time.sleep(0.02)
        job.refresh(1000)
    assert job.end_s - start_s == pytest.approx(600, abs=2)  # from the question, not from the answer
    assert len(asked.read_text().splitlines()) == 1


def test_a_squeue_that_never_answers_is_ended_and_asked_again_in_its_time(program, monkeypatch):
    asked = program("squeue", "exec sleep 60")
    monkeypatch.setattr(slurm, "START_LIMIT_S", 0.1)
    monkeypatch.setattr(slurm, "ANSWER_LIMIT_S", 0.1)
    job = BatchJob("12")
    job.ask_first()
    job.refresh(1000)
    assert job.fault == "squeue gave no answer in time"
    job.refresh(1000)
    assert len(asked.read_text().splitlines()) == 1
    job.refresh(0)
    time.sleep(0.5)
    assert len(asked.read_text().splitlines()) == 2
    job.refresh(1000)


def test_filters_of_the_user_do_not_hide_the_job(program, monkeypatch):
    program("squeue", 'echo "${SQUEUE_PARTITION:-9}:00"')
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    job = BatchJob("12")
    job.ask_first()
    assert job.end_s - time.monotonic() == pytest.approx(540, abs=2)


@pytest.mark.parametrize(
    ("queue", "scontrol", "said", "requeued"),
    [
        ("echo RUNNING 5:00", "exit 0", "job 12 is in the queue again", True),
        ("echo RUNNING 5:00", "echo disabled >&2; exit 1", "not requeued: scontrol: disabled", True),
        ("echo COMPLETING 5:00", "exit 0", "not requeued: somebody has cancelled it", False),
        ("echo COMPLETING 0:00", "exit 0", "job 12 is in the queue again", True),  # Slurm ends it at its limit
        ("echo COMPLETING INVALID", "exit 0", "job 12 is in the queue again", True),
        ("echo gone >&2; exit 1", "exit 0", "not requeued: squeue: gone", False),
    ],
)
def test_a_job_goes_back_into_the_queue_unless_it_was_cancelled(program, monkeypatch, queue, scontrol, said, requeued):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0"):
        monkeypatch.delenv(name, raising=False)
    program("squeue", queue)
    asked = program("scontrol", scontrol)
    assert said in requeue_job("")
    assert (asked.exists() and asked.read_text() == "requeue 12\n") == requeued


def test_an_obstacle_or_no_slurm_at_all_requeues_nothing(program, monkeypatch):
    asked = program("scontrol", "exit 0")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert requeue_job("no step was made").startswith("not requeued: no step was made")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "no Slurm job" in requeue_job("")
    assert not asked.exists()
