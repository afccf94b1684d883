"""Waiting for messages: with a limit, with a name, and without burning a core that another rank needs.

    test the requests --- all done ---> return
        |  not yet: give way at first, then sleep a little longer each time; now and then ask the watch (watch.py)
        `- past the limit ---> StallError: "rank 3: waited 600 s for activation of microbatch 2 from stage 0 (rank 1)"

What is awaited is named in words, and whoever is awaited in them as `rank 1` or `ranks 0-6 by 2`: see ranks.py.

MPI's own blocking waits spin. On a node with more ranks than cores a spinning rank takes the time that its peer needs
to answer, and inside one process it would hold up the thread that computes; so every wait of a training step is here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.ranks import name_ranks

POLLS_BEFORE_SLEEP = 50  # about 50 us of giving way: an answer that is nearly here is not slept past
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 500e-6
LOOK_EVERY_S = 0.1  # at the watch: nothing to a wait that is longer, and ordinary ones never get there


class Watch(Protocol):
    def look(self, what: Callable[[], str], waited_s: float, is_over: bool) -> None:
        """A wait has taken waited_s so far; is_over: it gives up after this. Raises StallError if the job ends."""


@dataclass
class Waits:
    """Waits of one kind of traffic: their limit, and the seconds they have taken so far.

    limit_s: None waits as MPI itself does: for ever, and on a core of its own. watch: who is told of long waits.
    """

    limit_s: float | None
    total_s: float = 0.0
    watch: Watch | None = None

    def all(self, requests: Sequence[MPI.Request], what: Callable[[], str]) -> None:
        """Return when every request is complete. `what()` names the wait, and is only called where that is told.

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
            self._poll(done, what, start)
        finally:
            self.total_s += time.perf_counter() - start

    def allreduce(
        self, comm: MPI.Intracomm, values: NDArray[Any], what: Callable[[], str], op: MPI.Op = MPI.SUM
    ) -> None:
        """The MPI library's allreduce of `values`, in place. Collective over comm. Raises StallError."""
        if self.limit_s is None:
            comm.Allreduce(MPI.IN_PLACE, values, op)
            return
        self.all([comm.Iallreduce(MPI.IN_PLACE, values, op)], lambda: f"{what()}, {_members(comm)}")

    def _poll(self, done: Callable[[], bool], what: Callable[[], str], start: float) -> None:
        polls, sleep_s, look_s = 0, 0.0, LOOK_EVERY_S
        while not done():
            if polls >= POLLS_BEFORE_SLEEP:
                waited_s = time.perf_counter() - start
                if waited_s > min(look_s, self.limit_s or math.inf):
                    self._look(what, waited_s)
                    look_s = waited_s + LOOK_EVERY_S
                sleep_s = min(max(2 * sleep_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
            if sleep_s:
                time.sleep(sleep_s)
            else:
                os.sched_yield()  # under a microsecond; sleep(0) takes the kernel's timer slack, 50 us and more
            polls += 1

    def _look(self, what: Callable[[], str], waited_s: float) -> None:
        is_over = self.limit_s is not None and waited_s > self.limit_s
        if self.watch:
            self.watch.look(what, waited_s, is_over)
        if is_over:
            raise StallError(
                f"rank {MPI.COMM_WORLD.rank}: waited {self.limit_s:g} s for {what()}; "
                "look for an earlier message of that rank, or raise limits.stall_s"
            )


def name_rank(comm: MPI.Intracomm, rank: int) -> str:
    """'rank 5', as the whole job counts, of a rank of comm."""
    return name_ranks(comm.group.Translate_ranks([rank], MPI.COMM_WORLD.group))


def _members(comm: MPI.Intracomm) -> str:
    """'ranks 0-3', as the whole job counts."""
    return name_ranks(comm.group.Translate_ranks(None, MPI.COMM_WORLD.group))
