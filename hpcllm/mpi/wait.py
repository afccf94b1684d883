"""Waiting for messages: with a limit, with a name, and without burning a core that another rank needs.

    test the requests --- all done ---> return
        |  not yet: yield at first, then sleep a little longer each time; now and then tell the watchdog (watchdog.py)
        `- past the limit ---> StallError: "rank 3: waited 600 s for activation of microbatch 2 from stage 0 (rank 1)"

What is awaited is named in words, the awaited ranks among them as `rank 1` or `ranks 0-6 by 2`: see rank_names.py.

MPI's own blocking waits spin. On a node with more ranks than cores a spinning rank takes the time that its peer needs
to answer, and inside one process it would hold up the thread that computes; so every wait of a training step is here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.mpi.rank_names import name_ranks

T = TypeVar("T")
POLLS_BEFORE_SLEEP = 50  # about 50 us of giving way: an answer that is nearly here is not slept past
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 500e-6
REPORT_EVERY_S = 0.1  # to the observer: nothing to a wait that is longer, and ordinary ones never get there


class WaitObserver(Protocol):
    """Receiver of reports on long waits: watchdog.Watchdog."""

    def report_wait(self, what: Callable[[], str], waited_s: float, is_over: bool) -> None:
        """Note a wait of waited_s so far; is_over: it gives up after this. Raises StallError if the job ends."""


@dataclass
class Waits:
    """Waits of one kind of traffic: their limit, and the seconds they have taken so far.

    limit_s: None waits as MPI itself does: for ever, and on a core of its own. observer: receives reports of long
    waits.
    """

    limit_s: float | None
    total_s: float = 0.0
    observer: WaitObserver | None = None

    def all(self, requests: Sequence[MPI.Request], what: Callable[[], str]) -> None:
        """Return when every request is complete. `what()` names the wait, and is called only for a report.

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
        """Call done() again and again until it returns true. Raises StallError, also where MPI itself gives up."""
        try:
            if done():
                return
            start = time.perf_counter()
            try:
                self._poll(done, what, start)
            finally:
                self.total_s += time.perf_counter() - start
        except MPI.Exception as error:
            rank = MPI.COMM_WORLD.rank
            raise StallError(
                f"rank {rank}: MPI failed in the wait for {what()}: {error}; a rank or its node may be gone"
            ) from error

    def allreduce(
        self, comm: MPI.Intracomm, values: NDArray[Any], what: Callable[[], str], op: MPI.Op = MPI.SUM
    ) -> None:
        """Reduce `values` in place by the MPI library's own allreduce. Collective over comm. Raises StallError."""
        if self.limit_s is None:
            comm.Allreduce(MPI.IN_PLACE, values, op)
            return
        self.all([comm.Iallreduce(MPI.IN_PLACE, values, op)], lambda: f"{what()}, {name_members(comm)}")

    def _poll(self, done: Callable[[], bool], what: Callable[[], str], start: float) -> None:
        polls, sleep_s, report_s = 0, 0.0, REPORT_EVERY_S
        while not done():
            if polls >= POLLS_BEFORE_SLEEP:
                waited_s = time.perf_counter() - start
                if waited_s > min(report_s, self.limit_s or math.inf):
                    self._report(what, waited_s)
                    report_s = waited_s + REPORT_EVERY_S
                sleep_s = min(max(2 * sleep_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S)
            if sleep_s:
                time.sleep(sleep_s)
            else:
                os.sched_yield()  # under a microsecond; sleep(0) takes the kernel's timer slack, 50 us and more
            polls += 1

    def _report(self, what: Callable[[], str], waited_s: float) -> None:
        limit_s = None if self.limit_s is None else self.limit_s * job_waits.patience
        is_over = limit_s is not None and waited_s > limit_s
        if self.observer:
            self.observer.report_wait(what, waited_s, is_over)
        if is_over:
            raise StallError(
                f"rank {MPI.COMM_WORLD.rank}: waited {limit_s:g} s for {what()}; "
                "look for an earlier message of that rank, or raise limits.stall_s"
            )


@dataclass
class JobWaits:
    """Limit of this job's waits on control paths, and who hears of them; set by system/job.py and open_watchdog.

    limit_s: for ranks that have nothing long to do before they come. patience: times every limit, of these and all
    other waits, while ranks compile kernels.
    """

    limit_s: float = 600.0
    patience: float = 1.0
    observer: WaitObserver | None = None

    def waits(self, factor: float = 1.0) -> Waits:
        """Return waits with that many times the limit."""
        return Waits(factor * self.limit_s, observer=self.observer)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Multiply every limit by WORK, until patience is set to 1 or the block ends."""
        self.patience = WORK
        try:
            yield
        finally:
            self.patience = 1.0


job_waits = JobWaits()
WORK = 6.0  # times the limit: for ranks that read, write or compute before they come


def together(comm: MPI.Intracomm, what: str, call: Callable[[], T], factor: float = 1.0) -> T:
    """Make a blocking collective call once all ranks of comm have come to it. Collective. Raises StallError.

    Until then the wait has a name and a limit, of factor x the job's.
    """
    meet(comm, what, factor)
    return call()


def meet(comm: MPI.Intracomm, what: str, factor: float = 1.0) -> None:
    """Wait until all ranks of comm are here. what: 'to share X'. Collective. Raises StallError."""
    job_waits.waits(factor).all([comm.Ibarrier()], lambda: f"{name_members(comm)} {what}")


def name_rank(comm: MPI.Intracomm, rank: int) -> str:
    """Return 'rank 5', the world rank of a rank of comm."""
    return name_ranks(comm.group.Translate_ranks([rank], MPI.COMM_WORLD.group))


def name_members(comm: MPI.Intracomm) -> str:
    """Return 'ranks 0-3', the world ranks of comm."""
    return name_ranks(comm.group.Translate_ranks(None, MPI.COMM_WORLD.group))
