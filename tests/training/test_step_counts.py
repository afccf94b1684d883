"""Counts of one training step on a device, layout by layout, held under ceilings; with -s a table of them is printed.

    HPCLLM_TESTS="sealed:1 sealed:2" bash tests/run.sh tests/training/test_step_counts.py -s

The host hands a step to the device and reads one thing back, at its end. In between it may wait for other ranks, never
for the device itself; with tp it must, for MPI sends what a layer has made, and knows no streams.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import small_runs
from pretend.counts import READ, THREAD, Counts, counting

from hpcllm.training.setup import open_run

pytestmark = pytest.mark.pretend
MICROBATCHES = 3
FIRST = 2  # steps before the one that is counted: memory is taken, sums are late


@dataclass(frozen=True)
class Budget:
    """A layout and the most that a step of it may take on any rank, of 2 layers and 3 microbatches."""

    ranks: int
    tables: dict[str, dict[str, Any]]
    launches: int
    events: int  # recorded, and waited for by streams
    copies: int  # between host and device, both ways, where MPI cannot read the device
    lane_waits: int = 0  # of threads beside the program, for bytes that MPI is to send
    reads: int = 1  # by the program of what the device has made: that at the end
    waits: int = 0  # of the program for the device besides
    threads: int = 0  # waits of the program for threads that sum and gather; how many are needed is a matter of time


BUDGETS = {
    "dp=1": Budget(1, {}, launches=1030, events=1, copies=2),
    "dp=2": Budget(2, {}, launches=1035, events=25, copies=10, lane_waits=8, threads=8),
    "pp=2": Budget(2, {"mesh": {"pp": 2}}, launches=620, events=16, copies=10, lane_waits=4, threads=4),
    # 4 sums a layer and microbatch, and what splits the vocabulary: each reads what it is to send; where messages of
    # ours sum, a wait for the last call's copy, so that receives start early, and one for this call's
    "tp=2": Budget(2, {"mesh": {"tp": 2}}, launches=1170, events=76, copies=68, reads=31, waits=6),
    "shard=all": Budget(
        2, {"optimizer": {"shard": "all"}}, launches=1120, events=211, copies=62, lane_waits=56, threads=40
    ),
}
COLUMNS = "launches records waits to_device bytes to_host bytes reads syncs threads lane_waits longest"


def step_counts(layout: str, comm: Any) -> Counts:
    """Counts of the third step of a small run, on this rank."""
    reach = {"gpu_aware": "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no"}
    tables = {"pipeline": {"microbatches": MICROBATCHES}, "communication": {"bucket_mib": 0.02, **reach}}
    with open_run(small_runs.tiny(**tables, **BUDGETS[layout].tables), comm) as run:
        small_runs.run_steps(run, FIRST)
        with counting() as counts:
            small_runs.run_steps(run, 1, first=FIRST)
    return counts


def row(counts: Counts) -> list[int | str]:
    longest = next(block for block in counts.blocks if not block.in_lane)
    others = sum(block.times for block in counts.waits() if block.name != READ)
    return [
        *(counts.launches, counts.event_records, counts.event_waits, *counts.to_device, *counts.to_host),
        *(counts.times(READ), others, counts.times(THREAD), sum(block.times for block in counts.waits(in_lane=True))),
        f"  {longest.longest} operations: {longest.name}, {longest.place}",
    ]


@pytest.mark.parallel([1, 2])
def test_a_step_keeps_to_its_budget(comm, monkeypatch):
    # words of damage of codecs that other tests have run would be waited for and read, too
    monkeypatch.setattr("hpcllm.codecs.gpu.device_codecs._words", {})
    found = {layout: step_counts(layout, comm) for layout, budget in BUDGETS.items() if budget.ranks == comm.size}
    if comm.rank == 0:
        print("", f"{'layout, rank':14}" + "".join(f"{name:>11}" for name in COLUMNS.split()), sep="\n")
    for layout, counts in found.items():
        for rank, values in enumerate(comm.gather(row(counts)) or ()):
            print(f"{f'{layout}, {rank}':14}" + "".join(f"{value:>11}" for value in values))
    for layout, counts in found.items():
        check(counts, layout, BUDGETS[layout])


def check(counts: Counts, layout: str, budget: Budget) -> None:
    others = [block for block in counts.waits() if block.name != READ]
    assert not counts.denied(), layout
    assert counts.times(READ) <= budget.reads, layout
    assert sum(block.times for block in others) <= budget.waits, (layout, [block.text for block in others])
    assert counts.launches <= budget.launches, layout
    assert counts.event_records + counts.event_waits <= budget.events, layout
    assert counts.to_device[0] + counts.to_host[0] <= budget.copies, layout
    assert sum(block.times for block in counts.waits(in_lane=True)) <= budget.lane_waits, layout
    assert counts.times(THREAD) <= budget.threads, layout
