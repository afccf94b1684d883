"""Counts of one training step on a device, layout by layout, held under ceilings; with -s a table of them is printed.

    HPCLLM_TESTS="sealed:1 sealed:2" bash tests/run.sh tests/training/test_step_counts.py -s

Each layout is counted twice: with PyTorch's operators alone, as on an XPU, and with kernels (emulated), as CUDA and
ROCm have them with CuPy. The host hands a step to the device and reads one thing back, at its end. In between it may
wait for other ranks, never for the device itself; with tp it must, for MPI sends what a layer has made, and knows no
streams.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import emulated
import pytest
import small_runs
from pretend.counts import READ, THREAD, Counts, counting
from pretend.kernels import emulated_kernels
from step_layouts import FIRST, LAYOUTS, tables_of

from hpcllm.mpi.message_memory import DeviceMemory
from hpcllm.training.setup import open_run

pytestmark = [pytest.mark.pretend, pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not())]


@dataclass(frozen=True)
class Budget:
    """The most that a step of a layout may take on any rank."""

    launches: int
    kernels: int  # launches where there are kernels
    events: int  # recorded, and waited for by streams
    copies: int  # between host and device, both ways, where MPI cannot read the device
    lane_waits: int = 0  # of threads beside the program, for bytes that MPI is to send
    reads: int = 1  # by the program of what the device has made: that at the end
    waits: int = 0  # of the program for the device besides
    threads: int = 0  # waits of the program for threads that sum and gather; how many are needed is a matter of time


BUDGETS = {
    "dp=1": Budget(launches=960, kernels=500, events=1, copies=2),
    "dp=1, bf16": Budget(launches=1260, kernels=605, events=1, copies=2),
    "dp=1, documents": Budget(launches=1265, kernels=605, events=1, copies=2),
    "dp=1, offload": Budget(launches=1290, kernels=630, events=25, copies=26),
    "dp=2": Budget(launches=970, kernels=510, events=25, copies=10, lane_waits=8, threads=8),
    "dp=2, int8": Budget(launches=1405, kernels=620, events=44, copies=12, lane_waits=12, threads=8),
    # gathers of the step before may end in this one: how many buckets that is, is a matter of time
    "shard=states": Budget(launches=1280, kernels=625, events=95, copies=28, lane_waits=16, threads=16),
    "shard=states+gradients": Budget(launches=1305, kernels=645, events=165, copies=48, lane_waits=26, threads=30),
    "shard=all": Budget(launches=1050, kernels=590, events=230, copies=62, lane_waits=56, threads=40),
    "pp=2": Budget(launches=610, kernels=300, events=16, copies=10, lane_waits=4, threads=4),
    "pp=2, bf16": Budget(launches=780, kernels=350, events=16, copies=10, lane_waits=4, threads=4),
    # 4 sums a layer and microbatch, and what splits the vocabulary: each reads what it is to send; where messages of
    # ours sum, a wait for the last call's copy, so that receives start early, and one for this call's
    "tp=2": Budget(launches=1085, kernels=620, events=76, copies=68, reads=31, waits=6),
}
EVENTS_OF_A_BUFFER = 2  # of new message memory: when it was taken, and when what was queued by then is over
ALLOCATE = DeviceMemory.allocate
WAYS = ["operators", "kernels"]
COLUMNS = "launches records waits to_device bytes to_host bytes reads syncs threads lane_waits longest"


def step_counts(layout: str, comm: Any) -> tuple[Counts, int]:
    """Counts of the third step of a small run, on this rank, and the new buffers that its messages took.

    How many they take is a matter of time: one more where a message before has not left yet.
    """
    config = small_runs.tiny(**tables_of(layout, os.environ.get("HPCLLM_PRETEND") == "open"))
    with open_run(config, comm) as run:
        small_runs.run_steps(run, FIRST)
        with counting() as counts, patch.object(DeviceMemory, "allocate", autospec=True, side_effect=ALLOCATE) as new:
            small_runs.run_steps(run, 1, first=FIRST)
    return counts, new.call_count


def row(counts: Counts) -> list[int | str]:
    longest = next(block for block in counts.blocks if not block.in_lane)
    others = sum(block.times for block in counts.waits() if block.name != READ)
    return [
        *(counts.launches, counts.event_records, counts.event_waits, *counts.to_device, *counts.to_host),
        *(counts.times(READ), others, counts.times(THREAD), sum(block.times for block in counts.waits(in_lane=True))),
        f"  {longest.longest} operations: {longest.name}, {longest.place}",
    ]


@pytest.mark.parallel([1])
@pytest.mark.parametrize("emulate", [False, True], ids=WAYS)
@pytest.mark.parametrize("layout", [name for name, (ranks, _) in LAYOUTS.items() if ranks == 1])
def test_a_step_of_one_rank_keeps_to_its_budget(comm, monkeypatch, layout, emulate):
    keeps_to_its_budget(comm, monkeypatch, layout, emulate)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("emulate", [False, True], ids=WAYS)
@pytest.mark.parametrize("layout", [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2])
def test_a_step_of_two_ranks_keeps_to_its_budget(comm, monkeypatch, layout, emulate):
    keeps_to_its_budget(comm, monkeypatch, layout, emulate)


def keeps_to_its_budget(comm: Any, monkeypatch: pytest.MonkeyPatch, layout: str, emulate: bool) -> None:
    # words of damage of codecs that other tests have run would be waited for and read, too
    monkeypatch.setattr("hpcllm.codecs.gpu.device_codecs._words", {})
    with emulated_kernels() if emulate else nullcontext():
        counts, new_buffers = step_counts(layout, comm)
    name = f"{layout}, {WAYS[emulate]}"
    if comm.rank == 0:
        print("", f"{'layout, rank':35}" + "".join(f"{column:>11}" for column in COLUMNS.split()), sep="\n")
    for rank, values in enumerate(comm.gather(row(counts)) or ()):
        print(f"{f'{name}, {rank}':35}" + "".join(f"{value:>11}" for value in values))
    check(counts, new_buffers, name, BUDGETS[layout], emulate)


def check(counts: Counts, new_buffers: int, layout: str, budget: Budget, emulate: bool) -> None:
    others = [block for block in counts.waits() if block.name != READ]
    assert not counts.denied(), layout
    assert counts.times(READ) <= budget.reads, layout
    assert sum(block.times for block in others) <= budget.waits, (layout, [block.text for block in others])
    assert counts.launches <= (budget.kernels if emulate else budget.launches), layout
    most_events = budget.events + EVENTS_OF_A_BUFFER * new_buffers
    assert counts.event_records + counts.event_waits <= most_events, layout
    assert counts.to_device[0] + counts.to_host[0] <= budget.copies, layout
    assert sum(block.times for block in counts.waits(in_lane=True)) <= budget.lane_waits, layout
    assert counts.times(THREAD) <= budget.threads, layout
