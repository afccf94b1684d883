"""Waiting for messages: with a limit, with a name, and without burning a core that another rank needs.

    test the requests --- all done ---> return
        |  not yet: give way at first, then sleep a little longer each time
        `- past the limit ---> StallError: "rank 3: waited 600 s for activation of microbatch 2 from stage 0 (rank 1)"

MPI's own blocking waits spin. On a node with more ranks than cores a spinning rank takes the time that its peer needs
to answer, and inside one process it would hold up the thread that computes; so every wait of a training step is here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError

POLLS_BEFORE_SLEEP = 50  # about 50 us of giving way: an answer that is nearly here is not slept past
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 500e-6


@dataclass
class Waits:
    """Waits of one kind of traffic: their limit, and the seconds they have taken so far.

    limit_s: None waits as MPI itself does: for ever, and on a core of its own.
    """

    limit_s: float | None
    total_s: float = 0.0

    def all(self, requests: Sequence[MPI.Request], what: Callable[[], str]) -> None:
        """Return when every request is complete. `what()` names the wait, and is only called when the limit passes.

        Raises StallError. Releases the GIL between tests.
        """
        if not requests:
            return
        if self.limit_s is not None:
            self.until(lambda: MPI.Request.Testall(requests), what)
            return
        start = time.perf_counter()
        MPI.Request.Waitall(requests)
        self.total_s += time.perf_counter() - start

    def until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return when done() says so, asked again and again. Raises StallError."""
        if done():
            return
        start = time.perf_counter()
        try:
            _poll(done, what, start, self.limit_s)
        finally:
            self.total_s += time.perf_counter() - start

    def allreduce(
        self, comm: MPI.Intracomm, values: NDArray[Any], what: Callable[[], str], op: MPI.Op = MPI.SUM
    ) -> None:
        """The MPI library's allreduce of `values`, in place. Collective over comm. Raises StallError."""
        if self.limit_s is None:
            comm.Allreduce(MPI.IN_PLACE, values, op)
            return
        self.all([comm.Iallreduce(MPI.IN_PLACE, values, op)], what)


def _poll(done: Callable[[], bool], what: Callable[[], str], start: float, limit_s: float | None) -> None:
    polls, sleep_s = 0, 0.0
    while not done():
        if polls >= POLLS_BEFORE_SLEEP:
            if limit_s is not None and time.perf_counter() > start + limit_s:
                raise StallError(
                    f"rank {MPI.COMM_WORLD.rank}: waited {limit_s:g} s for {what()}; "
                    "look for an earlier message of that rank, or raise limits.stall_s"
                )
            sleep_s = min(max(2 * sleep_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
        if sleep_s:
            time.sleep(sleep_s)
        else:
            os.sched_yield()  # under a microsecond; sleep(0) takes the kernel's timer slack, 50 us and more
        polls += 1
