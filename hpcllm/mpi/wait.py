"""Waiting for messages: with a limit, with a name, and without burning a core that another rank needs.

    test the requests --- all done ---> return
        |  not yet: yield at first, then sleep a little longer each time; now and then tell the watchdog (watchdog.py)
        `- past the limit ---> StallError: "rank 3: waited 600 s for activation of microbatch 2 from stage 0 (rank 1)"

    a short call, nothing computes beside it --- noted in job_waits.calls, then MPI's own ---> return
        `- meanwhile the thread of stuck_calls.py tells the watchdog of it, and past the limit ends the job

What is awaited is named in words, the awaited ranks among them as `rank 1` or `ranks 0-6 by 2`: see rank_names.py.

MPI's own blocking waits spin. On a node with more ranks than cores a spinning rank takes the time that its peer needs
to answer, and inside one process it would hold up the thread that computes; so every wait of a training step is here.
A poll costs little beside a long message, but a call of 5 us takes 15 as a request that is polled.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.mpi.rank_names import name_ranks

T = TypeVar("T")
POLLS_BEFORE_SLEEP = 50  # about 50 us of giving way: an answer that is nearly here is not slept past
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 500e-6
DEVICE_SLEEP_S = 50e-6  # at most, where messages are of a device: a library moves them on only while it is polled
REPORT_EVERY_S = 0.1  # to the observer: nothing to a wait that is longer, and ordinary ones never get there
MOST_BLOCKING_BYTES = 64 << 20  # of a call that may block under a limit; at 16 MiB polls may still double its time


class WaitObserver(Protocol):
    """Receiver of reports on long waits: watchdog.Watchdog."""

    def report_wait(self, what: Callable[[], str], waited_s: float, is_over: bool) -> None:
        """Note a wait of waited_s so far; is_over: it gives up after this. Raises StallError if the job ends."""

    def verdict(self) -> str:
        """Return the report on a job that ends, once other ranks have answered; "" if others make it."""


@dataclass
class Waits:
    """Waits of one kind of traffic: their limit, and the seconds they have taken so far.

    limit_s: None waits as MPI itself does: for ever, and on a core of its own. observer: receives reports of long
    waits. foreground: nothing is computed beside these waits, so that short calls may keep the core. The same on all
    ranks, as a call that blocks does not meet one that is polled. longest_sleep_s: between two polls.
    """

    limit_s: float | None
    total_s: float = 0.0
    observer: WaitObserver | None = None
    foreground: bool = False
    longest_sleep_s: float = LONGEST_SLEEP_S

    def poll_for(self, device: str) -> None:
        """Poll as often as messages of values on this type of device need it."""
        self.longest_sleep_s = LONGEST_SLEEP_S if device == "cpu" else DEVICE_SLEEP_S

    def may_block(self, size_bytes: int) -> bool:
        """True if MPI's blocking call is to be made for that many bytes: there is no limit, or `block` keeps to it."""
        if self.limit_s is None:
            return True
        return self.foreground and job_waits.guarded and size_bytes <= MOST_BLOCKING_BYTES

    def block(self, what: Callable[[], str], call: Callable[..., T], *arguments: object) -> T:
        """Return the result of a blocking call of MPI, for which may_block(its bytes) is true; `what()`: see `all`.

        Raises StallError where MPI gives up; past the limit the thread of stuck_calls.py ends the job.
        """
        if self.limit_s is None:
            return call(*arguments)
        thread, start_s = threading.get_ident(), time.perf_counter()
        job_waits.calls[thread] = BlockingCall(self, what, start_s)
        try:
            return call(*arguments)
        except MPI.Exception as error:
            raise _gave_up(what, error) from error
        finally:
            del job_waits.calls[thread]
            self.total_s += time.perf_counter() - start_s

    def settle(self, call: Callable[[], T], what: str = "end the work before a message") -> T:
        """Return the result of a call that blocks until this process's device has come so far; what: "end the step".

        It has a name and this limit, past which the thread of stuck_calls.py ends the job, for a device that hangs says
        nothing; its seconds are not counted. The call releases the GIL, as torch's do: to ask again and again would
        find out later.
        """
        words = f"its device to {what}, rank {MPI.COMM_WORLD.rank}"
        return Waits(self.limit_s, observer=self.observer).block(lambda: words, call)

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
            raise _gave_up(what, error) from error

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
                    self.report(what, waited_s)
                    report_s = waited_s + REPORT_EVERY_S
                sleep_s = min(max(2 * sleep_s, SHORTEST_SLEEP_S), self.longest_sleep_s)
            if sleep_s:
                time.sleep(sleep_s)
            else:
                os.sched_yield()  # under a microsecond; sleep(0) takes the kernel's timer slack, 50 us and more
            polls += 1

    def report(self, what: Callable[[], str], waited_s: float) -> None:
        """Tell the observer of a wait that goes on. Raises StallError once it is over, or the job is."""
        limit_s = None if self.limit_s is None else self.limit_s * job_waits.patience
        is_over = limit_s is not None and waited_s > limit_s
        if self.observer:
            self.observer.report_wait(what, waited_s, is_over)
        if is_over:
            raise StallError(
                f"rank {MPI.COMM_WORLD.rank}: waited {limit_s:g} s for {what()}; "
                "look for an earlier message of that rank, or raise limits.stall_s"
            )


def _gave_up(what: Callable[[], str], error: MPI.Exception) -> StallError:
    rank = MPI.COMM_WORLD.rank
    return StallError(f"rank {rank}: MPI failed in the wait for {what()}: {error}; a rank or its node may be gone")


class BlockingCall(NamedTuple):
    """Call of MPI that a thread is in."""

    waits: Waits
    what: Callable[[], str]
    start_s: float  # by time.perf_counter


@dataclass
class JobWaits:
    """Limit of this job's waits on control paths, and who hears of them; set by system/job.py and open_watchdog.

    limit_s: for ranks that have nothing long to do before they come. patience: times every limit, of these and all
    other waits, while ranks compile kernels. guarded: a thread looks at `calls`, by thread; see stuck_calls.py.
    """

    limit_s: float = 600.0
    patience: float = 1.0
    observer: WaitObserver | None = None
    guarded: bool = False
    calls: dict[int, BlockingCall] = field(default_factory=dict)

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
