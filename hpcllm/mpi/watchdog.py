"""Watchdog of a job that no longer moves: rank 0 hears of long waits, asks all ranks, reports once and ends the job.

    rank 3   waits ........... past the limit: "I wait for rank 2" --+
    rank 1   waits ................... asked: "I wait for rank 2" ---+--> rank 0: heard one? ask all, collect for
    rank 2   (stopped)                                               |    GRACE_S, then raise: who waits for whom
    rank 0   waits, and looks now and then for such messages  <------+

Waits call report_wait about ten times a second, from whichever thread they are in, and for a thread that blocks in MPI
another does, twice a second (stuck_calls.py); shorter waits never do. Rank 1
hears the same and speaks DEPUTY_S later, for when rank 0 is the one that is stopped; if both are, each other rank ends
the job by itself. The messages have a communicator of their own, are a line of text each, and block nobody.

The report goes from what each rank says of its waits to the rank that holds all up:

    rank 0 waits for rank 1  --> rank 1 waits for rank 2  --> rank 2 says nothing     rank 2 holds up ranks 0, 1
    rank 3 waits for ranks 0-3, as ranks 4-7 do                                       and ranks 3-7

A rank that is stopped, dead or lost in a computation says nothing, so the search starts from the silent ranks. Ranks in
the same wait, a collective that all have entered, do not wait for each other. `stall_report` is pure: tests give it the
waits of made-up jobs of any size.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.mpi.meeting_comm import plain
from hpcllm.mpi.rank_names import name_ranks, named_ranks, without_ranks
from hpcllm.mpi.wait import job_waits

REPORTERS = 2  # ranks 0 and 1
GRACE_S = 2.0  # for the ranks to answer
DEPUTY_S = 1.5  # from one reporter to the next, then to everybody else
TELL, ASK = 0, 1
NAME_BYTES = 80
MOST_LINES = 12  # of each table: a report is one screen, however many ranks there are
MOST_RUNS = 4  # of ranks, in one place


@dataclass(frozen=True)
class Waiting:
    """Wait of one rank in one thread; a rank may wait in two."""

    rank: int
    waited_s: float
    what: str  # names the awaited ranks as rank_names.py does


@dataclass
class Watchdog:
    """Part of one rank in the watch over all waits. comm: a communicator of its own."""

    comm: MPI.Intracomm
    place: Callable[[int], str]  # rank -> its place in the mesh; "" while there is none
    processes: NDArray[np.bytes_]  # (ranks,) on the reporters
    heard: list[Waiting] = field(default_factory=list)  # on the reporters
    _asked: bool = False
    _stalled: bool = False  # some wait that this rank knows of has passed its limit
    _told: set[int] = field(default_factory=set)  # threads that have said what they wait for
    _sends: list[MPI.Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def describe(self, rank: int) -> str:
        """Return the place of a rank and its process; on a reporter only."""
        return ", ".join(filter(None, [self.place(rank), self.processes[rank].decode(errors="replace")]))

    @contextmanager
    def describing(self, place: Callable[[int], str]) -> Iterator[None]:
        """Describe ranks by their place for a while."""
        before, self.place = self.place, place
        yield
        self.place = before  # not in a `finally`: a report that comes now is of these ranks

    def report_wait(self, what: Callable[[], str], waited_s: float, is_over: bool) -> None:
        """Tell the reporters what is awaited if that took too long or rank 0 asks; see wait.WaitObserver."""
        with self._lock:
            if self.comm == MPI.COMM_NULL:
                return  # closed while the guard of blocking calls was about to speak
            self._listen()
            self._stalled |= is_over
            if (self._stalled or self._asked) and threading.get_ident() not in self._told:
                self._told.add(threading.get_ident())
                self._tell(Waiting(self.comm.rank, waited_s, what()))
        if self._stalled and not is_over:
            raise StallError(f"rank {self.comm.rank} waited for {what()} when a wait passed its limit")

    def lines(self) -> Iterator[str]:
        """Yield 'rank 0: dp 0, stage 0, process 4711 on node7' for each rank; on a reporter only."""
        return (f"rank {rank}: {self.describe(rank)}" for rank in range(self.comm.size))

    def verdict(self) -> str:
        """Return the report, on a reporter, after GRACE_S for answers to come; "" on other ranks.

        Ranks return late, one after the other: a rank that returns knows that those before it did not end the job. ""
        at once for a wait that was none of the watched ones: a rank that has said nothing would be blamed itself.
        """
        if not self._told:
            return ""
        turn = min(self.comm.rank, REPORTERS)
        if turn < REPORTERS:
            with self._lock:
                others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
                self._sends += [self.comm.Isend([bytearray(), MPI.BYTE], rank, ASK) for rank in others]
        end_s = time.monotonic() + GRACE_S + turn * DEPUTY_S
        while time.monotonic() < end_s:
            with self._lock:
                self._listen()
            time.sleep(0.01)
        return stall_report(self.heard, self.comm.size, self.describe) if self.heard else ""

    def _listen(self) -> None:
        """Receive what has arrived, and complete sends."""
        self._sends = [request for request in self._sends if not request.Test()]
        status = MPI.Status()
        while message := self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            text = bytearray(status.Get_count(MPI.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            message.Recv([text, MPI.BYTE])
            if tag == ASK:
                self._asked = True
            else:
                self._stalled = True
                waited_s, _, what = text.decode().partition(" ")
                self.heard.append(Waiting(source, float(waited_s), what))

    def _tell(self, waiting: Waiting) -> None:
        text = f"{waiting.waited_s:.3f} {waiting.what}".encode()
        for reporter in range(min(REPORTERS, self.comm.size)):
            if reporter == self.comm.rank:
                self.heard.append(waiting)
            else:
                self._sends.append(self.comm.Isend([text, MPI.BYTE], reporter, TELL))


@contextmanager
def open_watchdog(world: MPI.Intracomm, describe: Callable[[int], str]) -> Iterator[Watchdog]:
    """Open a Watchdog: while open, a wait that passes its limit ends the job with a report. Collective over world.

    describe: rank -> its place in the mesh. Inside of another one, that one stays, and gets the description. Raises
    StallError with the report on rank 0; on others later, if at all.
    """
    if isinstance(job_waits.observer, Watchdog) and job_waits.observer.comm.size == world.size:
        with job_waits.observer.describing(describe):
            yield job_waits.observer
        return
    processes = _processes(world)
    watchdog = Watchdog(plain(world.Dup()), describe, processes)
    job_waits.observer = watchdog
    try:
        yield watchdog
    except StallError as error:
        if verdict := watchdog.verdict():
            raise StallError(verdict) from error
        raise
    finally:
        job_waits.observer = None
    with watchdog._lock:
        own, watchdog.comm = watchdog.comm, MPI.Intracomm()
    own.Free()  # not in a `finally`: Free is collective


def _processes(world: MPI.Intracomm) -> NDArray[np.bytes_]:
    """Gather (ranks,) 'process 4711 on node7' on the reporters; no other rank keeps a table of all. Collective."""
    name = f"process {os.getpid()} on {MPI.Get_processor_name()}".encode()
    mine = np.array(name[:NAME_BYTES], dtype=f"S{NAME_BYTES}")
    table = np.empty(world.size if world.rank < REPORTERS else 0, dtype=mine.dtype)
    for reporter in range(min(REPORTERS, world.size)):
        landing = [table, MPI.BYTE] if world.rank == reporter else None
        world.Gather([mine, MPI.BYTE], landing, reporter)
    return table


@dataclass(frozen=True)
class SameWait:
    """Ranks that wait for the same, in the same words."""

    members: frozenset[int]
    awaited: frozenset[int]  # none of the members


@dataclass(frozen=True)
class SilentRanks:
    """Ranks that say nothing and hold up the same others."""

    ranks: tuple[int, ...]
    held_up: Mapping[int, int]  # who waits for them -> over how many waits

    def name(self, describe: Callable[[int], str]) -> str:
        where = describe(self.ranks[0]) if len(self.ranks) == 1 else ""
        return name_ranks(self.ranks, MOST_RUNS) + (f" ({where})" if where else "")


def stall_report(waits: Sequence[Waiting], ranks: int, describe: Callable[[int], str] = lambda _: "") -> str:
    """Return the report on a job of that many ranks in which nothing moves: a verdict, then two short tables. Pure.

    describe: rank -> its place, as 'dp 1, stage 2, on node7'.
    """
    same_waits = _same_waits(waits)
    silent = _silent(same_waits, set(range(ranks)) - {wait.rank for wait in waits})
    culprits = [group for group in silent if group.held_up]
    longest_s = max((wait.waited_s for wait in waits), default=0.0)
    verdict = _verdict(culprits[0], describe) if culprits else _without_culprit(same_waits)
    lines = [f"nothing has moved for {longest_s:.0f} s: {verdict}"]
    if culprits:
        lines += ["  not heard from:", *_cut([_silent_line(group, describe) for group in culprits])]
    lines += [f"  not heard from, and nobody waits for them: {g.name(describe)}" for g in silent if not g.held_up]
    lines += ["  who waits, for how long, for what:", *_cut(_waiting_lines(waits))]
    if culprits:
        lines.append(
            "  Who is not heard from is stopped, dead, or computes all the time. If it is slow, raise limits.stall_s"
        )
    return "\n".join(lines)


def _silent(same_waits: Sequence[SameWait], ranks: Iterable[int]) -> list[SilentRanks]:
    """Group the silent ranks by whom they hold up; those that hold up most ranks first."""
    awaiting: dict[int, list[SameWait]] = {}  # rank -> who waits for it
    for wait in same_waits:
        for rank in wait.awaited:
            awaiting.setdefault(rank, []).append(wait)
    groups: dict[tuple[int, ...], list[int]] = {}  # by what holds for all of a group: which waits are for them
    for rank in sorted(ranks):
        groups.setdefault(tuple(id(wait) for wait in awaiting.get(rank, [])), []).append(rank)
    found = [SilentRanks(tuple(members), _held_up(members[0], awaiting)) for members in groups.values()]
    return sorted(found, key=lambda group: (-len(group.held_up), group.ranks))


def _same_waits(waits: Iterable[Waiting]) -> list[SameWait]:
    members: dict[str, set[int]] = {}
    for wait in waits:
        members.setdefault(wait.what, set()).add(wait.rank)
    return [SameWait(frozenset(ranks), named_ranks(what) - ranks) for what, ranks in members.items()]


def _held_up(rank: int, awaiting: Mapping[int, Sequence[SameWait]]) -> dict[int, int]:
    """Map each rank that waits for `rank` to 1 if it does so directly, 2 if for one that does, and so on."""
    distance: dict[int, int] = {}
    done: set[int] = set()
    reached, step = {rank}, 0
    while reached:
        nearest = {id(wait): wait for one in reached for wait in awaiting.get(one, []) if id(wait) not in done}
        done |= nearest.keys()
        step += 1
        reached = {member for wait in nearest.values() for member in wait.members} - distance.keys()
        distance |= dict.fromkeys(reached, step)
    return distance


def _verdict(worst: SilentRanks, describe: Callable[[int], str]) -> str:
    several, others = len(worst.ranks) > 1, len(worst.held_up)
    answered = "have not answered" if several else "has not answered"
    wait = f"{others} ranks wait" if others > 1 else "1 rank waits"
    through = ", directly or through others" if max(worst.held_up.values()) > 1 else ""
    return f"{worst.name(describe)} {answered}; {wait} for {'them' if several else 'it'}{through}"


def _without_culprit(same_waits: Sequence[SameWait]) -> str:
    """Return the verdict where every awaited rank has answered."""
    circle = _circle(same_waits)
    if circle:
        steps = " waits for ".join(f"rank {rank}" for rank in [*circle, circle[0]])
        return f"ranks wait in a circle: {steps}. That is a defect of the program"
    return "every rank that others wait for waits itself, but not for them: a message was lost, or went elsewhere"


def _circle(same_waits: Sequence[SameWait]) -> list[int]:
    """Return ranks of which each waits for the next and the last for the first; [] if there is no circle."""
    awaited: dict[int, frozenset[int]] = {}
    for wait in same_waits:
        awaited |= {rank: awaited.get(rank, frozenset()) | wait.awaited for rank in wait.members}
    ends: set[int] = set()  # whose waits lead nowhere
    path: list[int] = []
    for start in awaited:
        path = [start] if start not in ends else []
        while path:
            following = sorted(awaited.get(path[-1], frozenset()) - ends)
            if not following:
                ends.add(path.pop())
            elif following[0] in path:
                return path[path.index(following[0]) :]
            else:
                path.append(following[0])
    return path


def _silent_line(group: SilentRanks, describe: Callable[[int], str]) -> str:
    direct = [rank for rank, distance in group.held_up.items() if distance == 1]
    through = [rank for rank, distance in group.held_up.items() if distance > 1]
    rest = f", through them by {name_ranks(through, MOST_RUNS)}" if through else ""
    return f"    {group.name(describe)}: awaited by {name_ranks(direct, MOST_RUNS)}{rest}"


def _waiting_lines(waits: Iterable[Waiting]) -> list[str]:
    """Return a line for each kind of wait, the longest wait first."""
    kinds: dict[str, list[Waiting]] = {}
    for wait in waits:
        kinds.setdefault(_kind(wait.what), []).append(wait)
    lines = []
    for name, kind in kinds.items():
        who, texts = name_ranks((wait.rank for wait in kind), MOST_RUNS), {wait.what for wait in kind}
        what, longest_s = texts.pop() if len(texts) == 1 else name, max(wait.waited_s for wait in kind)
        lines.append((-longest_s, f"    {longest_s:6.1f} s  {who}: {what}"))
    return [line for _, line in sorted(lines, key=lambda line: line[0])]


def _kind(what: str) -> str:
    """Return a text that is equal for the same wait of several ranks."""
    return re.sub(r"[\d.]+ s ago", "* s ago", without_ranks(what))


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"    ... and {more} more lines like these"]
