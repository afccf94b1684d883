"""A run stops in time: whatever one more step brings, its last checkpoint is on disk before the limit."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from hpcllm.config import schema as configs
from hpcllm.system.slurm import BatchJob
from hpcllm.training import requests
from hpcllm.training.requests import LEAVING_S, Deadline, Margin, make_deadline


def limit(left_s: float, margin: Margin, wall_s: float = 0.0) -> Deadline:
    job = BatchJob("12", end_s=time.monotonic() + left_s)
    job._queried_s = time.monotonic()  # so that no batch system is asked here
    return Deadline(wall_s, margin, job)


@pytest.mark.parametrize("seed", range(100))
def test_whoever_goes_on_has_time_for_a_validation_a_write_a_step_the_last_write_and_the_way_out(seed):
    """Times of a made-up run whose limit comes anywhere. It does not stop much earlier than that takes, either."""
    generator = np.random.default_rng(seed)
    step_s, write_s, validation_s = 10 ** generator.uniform(-2, 2, 3)
    end_s = 20 * step_s + 5 * (write_s + validation_s) + float(generator.uniform(100, 1000))
    margin, now_s = Margin(0.0, 1e9 * write_s, 1.2 * validation_s / step_s), 0.0
    margin.step(10 * step_s)  # the first one compiles
    while True:
        took_s = step_s * generator.uniform(0.7, 1.1)
        now_s += took_s
        margin.step(took_s)
        if end_s - now_s < margin.seconds:
            break
        if generator.random() < 0.3:
            now_s += validation_s
            margin.validation(validation_s)
        if generator.random() < 0.3:
            now_s += write_s
            margin.write(write_s)
    assert now_s + write_s + LEAVING_S <= end_s
    written, validated = margin.write_s > 0, margin.validation_s > 0
    guessed_s = (0 if written else 2 * write_s) + (0 if validated else 0.4 * validation_s)
    assert end_s - now_s < 3 * write_s + 4 * step_s + 2 * validation_s + LEAVING_S + guessed_s


def test_a_margin_of_the_run_file_is_taken_as_it_is():
    margin = Margin(95.0, 1e12)
    margin.step(1000.0)
    margin.write(1000.0)
    assert margin.seconds == 95.0


def test_the_first_step_counts_only_while_it_is_the_only_one():
    margin = Margin(0.0, 0.0)
    margin.step(60.0)
    assert margin.seconds == 2 * 60 + LEAVING_S
    for seconds in (2.0, 3.0, 1.0):
        margin.step(seconds)
    assert margin.seconds == 2 * 3 + LEAVING_S


def test_a_write_that_is_measured_replaces_the_guess():
    margin = Margin(0.0, 5e9)
    assert margin.seconds == 2 * 10 + LEAVING_S
    margin.write(1.0)
    margin.write(0.5)
    assert margin.seconds == 2 * 1 + LEAVING_S


def test_the_nearer_limit_counts(monkeypatch):
    monkeypatch.setattr(requests, "STARTED_S", time.monotonic() - 100)
    assert limit(50, Margin(1, 0)).left_s == pytest.approx(50, abs=1)
    assert limit(50, Margin(1, 0), wall_s=120).left_s == pytest.approx(20, abs=1)
    assert limit(50, Margin(1, 0), wall_s=500).left_s == pytest.approx(50, abs=1)
    assert Deadline(110, Margin(1, 0), None).left_s == pytest.approx(10, abs=1)
    assert Deadline(0, Margin(1, 0), None).left_s == math.inf


@pytest.mark.parametrize(("left_s", "near"), [(500, False), (99, True), (-5, True), (math.inf, False)])
def test_it_is_near_inside_the_margin(left_s, near):
    assert limit(left_s, Margin(100, 0)).is_near() == near


def test_what_is_said_at_the_start_names_job_time_and_margin():
    job = BatchJob("12_3", restarts=2, end_s=time.monotonic() + 500.4)
    assert Deadline(0, Margin(95, 0), job).lines() == [
        "Slurm job 12_3, restart 2: 500 s left; the run will stop by itself 95 s before that"
    ]
    assert "note: that is less than the margin" in Deadline(0, Margin(600, 0), job).lines()[1]
    assert "0.5 GB/s" in Deadline(0, Margin(0, 4e9), job).lines()[0]
    unknown = Deadline(0, Margin(95, 0), BatchJob("12", fault="squeue: not there"))
    assert unknown.lines() == [
        "Slurm job 12: its time limit is not known (squeue: not there); limits.wall_s can set one"
    ]
    assert Deadline(0, Margin(95, 0), BatchJob("12")).lines() == ["Slurm job 12: no time limit"]
    assert Deadline(1e6, Margin(95, 0), None).lines()[0].startswith("limits.wall_s: ")
    assert Deadline(0, Margin(95, 0), None).lines() == []


def test_a_run_file_decides_it(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID_HET_GROUP_0", raising=False)
    config = configs.from_tables({"limits": {"wall_s": 3600, "margin_s": 7}, "model": {"vocabulary": 100}})
    assert make_deadline(config).margin.seconds == 7
    assert make_deadline(config).job is None
    assert 0 < make_deadline(config).left_s < 3600
