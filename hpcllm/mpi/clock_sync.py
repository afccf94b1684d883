"""Synchronisation of the clocks of different nodes: each rank asks rank 0 for the time, again and again.

    rank r   t0 ----.                  .----> t1        rank 0's T is read somewhere between t0 and t1, so
                     `---> rank 0: T --'                this clock - rank 0's = (t0 + t1) / 2 - T, wrong by
                                                        (t1 - t0) / 2 at most: the shortest round trip counts

Source: Cristian 1989, "Probabilistic clock synchronization", section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.mpi.wait import Waits, name_rank

ROUND_TRIPS = 16  # the first wakes both ranks up, a few meet a busy core
TAG = 32700


@dataclass(frozen=True)
class ClockOffset:
    """Lead of this rank's clock over rank 0's: subtract it from this rank's times to get rank 0's."""

    lead_s: float
    error_s: float  # upper bound


def measure_offset(comm: MPI.Intracomm, waits: Waits, clock: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Measure this rank's clock against rank 0's. Collective; about a millisecond a rank. Raises StallError."""
    if comm.rank == 0:
        for peer in range(1, comm.size):
            for _ in range(ROUND_TRIPS):
                _tell_time(comm, peer, waits, clock)
        return ClockOffset(0.0, 0.0)
    return min((_ask_time(comm, waits, clock) for _ in range(ROUND_TRIPS)), key=lambda offset: offset.error_s)


def _tell_time(comm: MPI.Intracomm, peer: int, waits: Waits, clock: Callable[[], float]) -> None:
    question: NDArray[np.float64] = np.empty(1)
    waits.all([comm.Irecv(question, peer, TAG)], lambda: f"a question for the time from {name_rank(comm, peer)}")
    comm.Send(np.array([clock()]), peer, TAG)  # eight bytes: no library waits for the receiver with these


def _ask_time(comm: MPI.Intracomm, waits: Waits, clock: Callable[[], float]) -> ClockOffset:
    answer: NDArray[np.float64] = np.empty(1)
    request = comm.Irecv(answer, 0, TAG)
    start = clock()
    comm.Send(np.zeros(1), 0, TAG)
    waits.all([request], lambda: f"the time from {name_rank(comm, 0)}")
    end = clock()
    return ClockOffset((start + end) / 2 - answer.item(), (end - start) / 2)
