"""Watch over calls of MPI that do not return, from a thread of its own.

    thread        main: comm.bcast(x)   the same call   the same call ...   past the limit: says which, ends the job
    looks at          |                    |                |                    |
    all stacks   -----o--------------------o----------------o--------------------o-----> time, LOOKS times in a limit

Polite waits (wait.py) have names and limits of their own. A short call that blocks under such a limit stands in
job_waits.calls: for it this thread says to the watchdog what the wait would say itself, asks and answers, and ends the
job. That takes MPI_THREAD_MULTIPLE; with less all waits are polite ones.

The stacks are for what neither sees, without a call of MPI: a bare blocking collective, and a call that ought to return
at once and hangs inside the library, as when a peer's link is gone. The limit is WORK times the job's, for what a bare
collective waits for may be a rank that reads or writes.

The call is found in the source, by the place at which the innermost frame of a thread stands: it counts if the name
that is called there is one of MPI's. So a long computation, or a kernel that is compiled, is never taken for one. A
call that keeps the GIL (MPI_Init, MPI_Finalize, MPI_Abort) stops this thread as well: job.py has a limit for those.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from mpi4py import MPI

from hpcllm.errors import StallError
from hpcllm.mpi import meeting_comm
from hpcllm.mpi.wait import REPORT_EVERY_S, WORK, JobWaits

LOOKS = 20  # at a call before it counts: a loop that happens to stand at the same place is not that regular
LONGEST_NAP_S = 0.5  # a rank that is asked has watchdog.GRACE_S to answer
MARGIN_S = 5.0  # for the ranks that wait politely, who can say more
TURN_S = 1.5  # from rank to rank, up to the third: one of those that hang says it
PACKAGE = str(Path(__file__).parents[1])
OTHERS = {"wait", "test", "free", "start", "cancel", "get", "all", "copy", "remove", "add", "keys", "items", "pop"}


@cache
def mpi_names() -> frozenset[str]:
    """Names of what communicators, requests, windows, messages and files can do."""
    kinds = (MPI.Intracomm, MPI.Request, MPI.Prequest, MPI.Win, MPI.Message, MPI.File, MPI.Group)
    return frozenset({name for kind in kinds for name in dir(kind) if not name.startswith("_")} - OTHERS)


@dataclass
class Stand:
    """Place at which a thread was seen, since when, and how often."""

    place: tuple[int, CodeType, int]
    since_s: float
    looks: int = 1


@dataclass
class StuckCalls:
    """Calls in which this process's threads were seen."""

    stands: dict[int, Stand] = field(default_factory=dict)

    def look(self, limit_s: float, now_s: float) -> str:
        """Look at all threads once; returns a call of MPI that has not returned for limit_s, in words, or ""."""
        before, self.stands = self.stands, {}
        for thread, innermost in sys._current_frames().items():
            frame = _caller(innermost)
            place = (id(frame), frame.f_code, frame.f_lasti)
            stand = before.get(thread)
            if stand is None or stand.place != place:
                stand = Stand(place, now_s)
            else:
                stand.looks += 1
            self.stands[thread] = stand
            waited_s = now_s - stand.since_s
            if waited_s > limit_s and stand.looks >= LOOKS and (call := call_of(frame)):
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                return (
                    f"MPI has not returned for {waited_s:.0f} s from `{call}` ({where}); a rank that it needs is gone"
                )
        return ""


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that called a collective of a MeetingComm, in whose own frame any of them may hang."""
    while frame.f_code.co_filename == meeting_comm.__file__ and frame.f_back:
        frame = frame.f_back
    return frame


def call_of(frame: FrameType) -> str:
    """Return the source of the call of MPI at which a frame of this package stands, "" if it is at something else."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return ""
    line, last_line, start, end = next(islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if line is None or last_line is None or start is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(line, last_line + 1)]
    encoded = [text.encode() for text in lines]  # columns count bytes
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    source = " ".join(part.decode(errors="replace").strip() for part in encoded)
    called = re.match(r"[\w.\[\]]*?\b(\w+)\(", source)
    return source if called and called[1] in mpi_names() else ""


def report_calls(job: JobWaits, now_s: float) -> str:
    """Tell the watchdog of the calls in which threads have blocked for long; why the job ends, or "". A look each."""
    for call in list(job.calls.values()):
        waited_s = now_s - call.start_s
        try:
            if waited_s > REPORT_EVERY_S:
                call.waits.report(call.what, waited_s)
        except StallError as error:
            observer = call.waits.observer
            return (observer and observer.verdict()) or str(error)
    return ""


def watch_calls(job: JobWaits, rank: int, end: Callable[[str], None]) -> None:
    """Start the thread that watches this process's calls; a second start does nothing. end: ends the job, in words."""
    name = "hpcllm-stuck-calls"
    if any(thread.name == name for thread in threading.enumerate()):
        return

    def watch() -> None:
        found, calls = "", StuckCalls()
        while not found:
            limit_s = WORK * job.limit_s + MARGIN_S + min(rank, 2) * TURN_S
            time.sleep(min(limit_s / (2 * LOOKS), LONGEST_NAP_S))
            found = report_calls(job, time.perf_counter()) or calls.look(limit_s, time.monotonic())
        end(found)

    job.guarded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    threading.Thread(target=watch, name=name, daemon=True).start()
