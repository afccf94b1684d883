"""Signals, files and the time: whichever rank hears of it, all stop or save after the same step, and say why."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_runs import tiny

from hpcllm.config.schema import Config
from hpcllm.optim.buckets import GradientBuckets
from hpcllm.system.job import StopSignals
from hpcllm.training import requests
from hpcllm.training.loop import train
from hpcllm.training.requests import NO_REQUESTS, REASONS, SAVE, STOP, TIME, Requests
from hpcllm.training.summary import Summary

STEPS = 8
PEOPLE = (STOP, "SIGINT")


def test_any_rank_is_heard_and_of_several_reasons_the_first_is_given():
    for names in itertools.chain.from_iterable(itertools.combinations((*REASONS, SAVE), n) for n in range(4)):
        for ranks in (1, 2, 5):
            counts = [requests._counts({name}, 88.4, 95.0) for name in names]
            agreed = Requests.from_sums(sum((*counts, *[NO_REQUESTS] * ranks)))
            assert agreed.save == (SAVE in names)
            assert agreed.reason == next((name for name in REASONS if name in names), "")
            assert agreed.stop == bool(agreed.reason)
            assert agreed == Requests.from_sums(sum(itertools.chain([NO_REQUESTS] * ranks, reversed(counts))))


def test_the_reason_is_given_in_words_and_numbers():
    def why(*counts) -> str:
        return Requests.from_sums(requests._counts(*counts)).why

    assert why({TIME}, 88.4, 95.0) == "the time limit: 88 s were left, the margin is 95 s"
    assert why({"SIGUSR1"}) == "SIGUSR1"
    assert "STOP" in why({STOP})


@pytest.mark.parametrize("reason", REASONS)
def test_only_what_the_batch_system_stops_goes_back_and_only_if_it_got_on(reason):
    agreed = Requests(reason=reason, why=reason)
    assert (agreed.why_not_requeued(steps_made=1) == "") == (reason not in PEOPLE)
    assert agreed.why_not_requeued(steps_made=0)


def test_a_file_save_is_requested_once_however_quick_the_steps_are(tmp_path):
    """Between two looks into the folder, while the checkpoint is written, and again when there is a new file."""
    with StopSignals() as signals:
        no_limit = requests.Deadline(0.0, requests.Margin(0.0, 0.0), None)
        listener = requests.RequestListener(tmp_path, signals, STEPS, None, no_limit)
        for first in (1, 4):
            (tmp_path / SAVE).touch()
            listener._looked_s = -requests.LOOK_EVERY_S  # a second later
            agreed = []
            for step in range(first, first + 3):
                agreed.append(Requests.from_sums(listener.poll()))
                listener.agreed(agreed[-1], step, 0.01)
            assert [each.save for each in agreed] == [True, False, False]
            listener.saved(tmp_path / f"step_{first:08}.h5", 0.01)
            assert not (tmp_path / SAVE).exists()


def run(comm, name: str, during: Callable[[int], None] | None = None, **tables) -> Summary:
    """A run of STEPS steps; during(n) is called in the middle of the n-th step of this start, on all ranks."""
    steps = itertools.count(1)

    def begin(self, *which, begin=GradientBuckets.begin):
        during(next(steps))
        begin(self, *which)

    with pytest.MonkeyPatch.context() as patch, StopSignals() as signals:
        patch.setattr(requests, "LOOK_EVERY_S", 0.0)
        if during:
            patch.setattr(GradientBuckets, "begin", begin)
        summary = train(config_of(comm, name, **tables), comm, signals)
    comm.Barrier()
    return summary


def config_of(comm, name: str, **tables) -> Config:
    return tiny(**{"run": {"name": f"{name} {comm.size}", "steps": STEPS}, "mesh": {"dp": comm.size}} | tables)


def folder_of(comm, name: str) -> Path:
    run = config_of(comm, name).run
    return Path(run.folder) / run.name


def on_rank(comm, rank: int, at_step: int, act: Callable[[], object]) -> Callable[[int], None]:
    """To do `act` on one rank only, and all others wait for it, so that it is done before the step is over."""

    def during(step: int) -> None:
        if step == at_step:
            if comm.rank == rank % comm.size:
                act()
            comm.Barrier()

    return during


def same_everywhere(comm, value) -> bool:
    return len(set(comm.allgather(value))) == 1


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_on_one_rank_is_known_by_its_name_on_all(comm, number):
    stop = on_rank(comm, -1, 3, lambda: os.kill(os.getpid(), number))
    summary = run(comm, number.name, stop)
    assert (summary.step, summary.stopped_by, summary.validation) == (3, number.name, None)
    assert summary.checkpoint.name == "step_00000003.h5"
    assert run(comm, number.name).step == STEPS


@pytest.mark.parallel([1, 3])
def test_a_file_stop_ends_a_run_and_goes_with_it(comm):
    folder = folder_of(comm, "stop")
    summary = run(comm, "stop", on_rank(comm, 0, 4, (folder / STOP).touch))
    assert summary.step == 4
    assert "STOP" in summary.stopped_by
    assert same_everywhere(comm, (summary.stopped_by, summary.not_requeued, summary.checkpoint))
    assert "somebody asked" in summary.not_requeued
    assert not (folder / STOP).exists()
    assert run(comm, "stop").step == STEPS


@pytest.mark.parallel([1, 2])
def test_a_stop_that_is_there_before_the_start_is_heeded_once(comm):
    folder = folder_of(comm, "before")
    run(comm, "before", on_rank(comm, 0, 2, (folder / STOP).touch))
    before = (folder / "log.jsonl").read_text()
    comm.Barrier()
    if comm.rank == 0:
        (folder / STOP).touch()
    comm.Barrier()
    summary = run(comm, "before")
    assert (summary.step, summary.validation) == (2, None)
    assert summary.stopped_by
    assert summary.checkpoint.name == "step_00000002.h5"
    after = (folder / "log.jsonl").read_text()
    told = [json.loads(line) for line in after.removeprefix(before).splitlines()]
    assert after.startswith(before)
    assert [("start" in record, "end" in record) for record in told] == [(True, False), (False, True)]
    assert not (folder / STOP).exists()
    assert run(comm, "before").step == STEPS


@pytest.mark.parallel([1, 3])
def test_a_file_save_is_a_checkpoint_and_the_run_goes_on(comm):
    folder = folder_of(comm, "save")
    file, seen = folder / SAVE, []
    touch = on_rank(comm, 0, 3, file.touch)

    def during(step: int) -> None:
        touch(step)
        if step > 3 and not file.exists():
            seen.append((folder / "checkpoints" / "step_00000003.h5").exists())

    summary = run(comm, "save", during)
    assert (summary.step, summary.stopped_by) == (STEPS, "")
    assert not file.exists()
    assert all(seen)  # gone only when its checkpoint was there
    assert [path.name for path in sorted((folder / "checkpoints").glob("*.h5"))] == [
        "step_00000003.h5",
        f"step_{STEPS:08}.h5",
    ]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_stops_by_itself_before_its_time_is_over(comm, monkeypatch, asynchronous):
    """1000 s from the start of the process; in step 5 the clock is put 950 s forward."""
    limits = {"wall_s": 1000.0, "margin_s": 100.0, "stall_s": 15}
    monkeypatch.setattr(requests, "STARTED_S", time.monotonic())
    forward = on_rank(comm, 0, 5, lambda: monkeypatch.setattr(requests, "STARTED_S", time.monotonic() - 950))
    tables = {"limits": limits, "checkpoint": {"every_steps": 2, "asynchronous": asynchronous}}
    summary = run(comm, f"time {asynchronous}", forward, **tables)
    assert summary.step == 5
    assert summary.stopped_by == "the time limit: 50 s were left, the margin is 100 s"
    assert same_everywhere(comm, summary.stopped_by)
    assert summary.not_requeued == ""
    later = run(comm, f"time {asynchronous}", **tables)  # late from the start: a step is made all the same
    assert (later.step, later.not_requeued) == (6, "")


@pytest.mark.parallel([1, 2])
def test_a_run_that_is_to_stop_after_its_last_step_is_finished(comm):
    summary = run(comm, "last", on_rank(comm, 0, STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (summary.step, summary.stopped_by) == (STEPS, "")
    assert summary.validation
    records = [json.loads(line) for line in (folder_of(comm, "last") / "log.jsonl").read_text().splitlines()]
    assert np.isfinite([record["validation_loss"] for record in records if "validation_loss" in record]).tolist() == [
        True
    ]


@pytest.mark.parallel([1])
def test_a_file_stop_beside_a_finished_run_is_taken_away(comm):
    run(comm, "over")
    (folder_of(comm, "over") / STOP).touch()
    summary = run(comm, "over")
    assert (summary.step, summary.stopped_by) == (STEPS, "")
    assert summary.validation
    assert not (folder_of(comm, "over") / STOP).exists()
