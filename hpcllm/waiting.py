"""Waiting for messages: with a limit, with a name, and without burning a core that another rank needs.

    test the requests --- all done ---> return
        |  not yet: give way at first, then sleep a little longer each time
        `- past the limit ---> StallError: "rank 3: waited 600 s for activation of microbatch 2 from stage 0 (rank 1)"

MPI's own blocking waits spin. On a node with more ranks than cores a spinning rank takes the time that its peer needs
to answer, and inside one process it would hold up the thread that computes; so every wait of a training step is here.
"""

from __future__ import annotations

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
    """Waits of one kind of traffic: their limit, and the seconds they have taken so far."""

    limit_s: float
    total_s: float = 0.0

    def all(self, requests: Sequence[MPI.Request], what: Callable[[], str]) -> None:
        """Return when every request is complete. `what()` names the wait, and is only called when the limit passes.

        Raises StallError. Releases the GIL between tests.
        """
        if not requests or MPI.Request.Testall(requests):
            return
        start = time.perf_counter()
        try:
            _poll(requests, what, start + self.limit_s, self.limit_s)
        finally:
            self.total_s += time.perf_counter() - start

    def allreduce(
        self, comm: MPI.Intracomm, values: NDArray[Any], what: Callable[[], str], op: MPI.Op = MPI.SUM
    ) -> None:
        """The MPI library's allreduce of `values`, in place. Collective over comm. Raises StallError."""
        self.all([comm.Iallreduce(MPI.IN_PLACE, values, op)], what)


def _poll(requests: Sequence[MPI.Request], what: Callable[[], str], deadline: float, limit_s: float) -> None:
    polls, sleep_s = 0, 0.0
    while not MPI.Request.Testall(requests):
        if polls >= POLLS_BEFORE_SLEEP:
            if time.perf_counter() > deadline:
                raise StallError(
                    f"rank {MPI.COMM_WORLD.rank}: waited {limit_s:g} s for {what()}; "
                    "look for an earlier message of that rank, or raise limits.stall_s"
                )
            sleep_s = min(max(2 * sleep_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
        time.sleep(sleep_s)
        polls += 1
