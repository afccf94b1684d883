"""Seconds of an operation on many ranks: start together, take turns, the slowest rank counts.

    round      0              1              2          ...      turns: what slows the machine for a second slows
    rank 0   |A |B  |C  |   |A |B  |C  |   |A |B  |C  |          all cases alike
    rank 1   |A|B   |C   |  |A|B   |C   |  |A|B   |C   |
             ^ all ranks meet, then the clock of each starts; time of A in a round = the longest of the ranks'

The meeting is an allreduce of one integer, so nobody leaves before all have come, and it carries along whether a rank
was asked to stop, so that all stop at the same place; then, as everybody is here, a barrier of the library's, which
they leave within about a microsecond of each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.mpi.wait import job_waits


@dataclass(frozen=True)
class Case:
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None  # not timed: brings fresh data


@dataclass(frozen=True)
class Seconds:
    """Seconds of one case, over the iterations."""

    samples: NDArray[np.float64]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        quarters = np.percentile(self.samples, [25, 75])
        return float((quarters[1] - quarters[0]) / self.median)

    def each(self, count: int) -> Seconds:
        """Seconds of one of `count` equal parts."""
        return Seconds(self.samples / count)

    def summary(self) -> dict[str, Any]:
        """Fields of a Record."""
        least, most = float(self.samples.min()), float(self.samples.max())
        count = int(self.samples.size)
        return {"median_s": self.median, "min_s": least, "max_s": most, "spread": self.spread, "iterations": count}


def finish(requests: Sequence[MPI.Request], what: str) -> None:
    """Return when they are done: gives way, never sleeps, so that the clock does not show a nap. Raises StallError."""
    limit_s = job_waits.limit_s
    deadline = time.perf_counter() + limit_s
    while not MPI.Request.Testall(requests):
        if time.perf_counter() > deadline:
            raise StallError(f"rank {MPI.COMM_WORLD.rank}: waited {limit_s:g} s for {what}")
        os.sched_yield()


def meet(comm: MPI.Intracomm, stop: bool = False) -> bool:
    """Return when all ranks are here: whether any of them wants to stop. Collective over comm. Raises StallError."""
    mine, answer = np.array([stop], dtype=np.int32), np.zeros(1, dtype=np.int32)
    finish([comm.Iallreduce(mine, answer, MPI.MAX)], "all ranks to start an iteration")
    return bool(answer[0])


def in_turns(
    comm: MPI.Intracomm, cases: Sequence[Case], rounds: int, warmup: int, stopping: Callable[[], bool]
) -> list[Seconds]:
    """Seconds of each case: `rounds` of them, fewer if a rank was asked to stop. Collective over comm."""
    own_s = np.zeros((warmup + rounds, len(cases)))
    done, stop = 0, False
    while done < warmup + rounds and not stop:
        for index, case in enumerate(cases):
            case.prepare()
            stop = meet(comm, stop or stopping())
            comm.Barrier()
            start_s = time.perf_counter()
            case.run()
            own_s[done, index] = time.perf_counter() - start_s
        done += 1
    timed_s = np.ascontiguousarray(own_s[min(warmup, done) : done])
    job_waits.waits().allreduce(comm, timed_s, lambda: "all ranks' times", MPI.MAX)
    return [Seconds(timed_s[:, index]) for index in range(len(cases))] if timed_s.size else []
