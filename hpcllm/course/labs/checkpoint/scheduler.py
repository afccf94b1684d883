"""The scheduler of forked ranks: who goes on, whose call fails, who is killed. Each order is one that may happen.

    rank 0   open?            ...
    rank 1   in a gather      waits for rank 0           all have asked --> the first of `order` that may go on, goes on
    rank 2   pwrite?          ...

Nothing goes on before all have asked or ended, so a run is the same each time, and an order that a busy machine shows
once a year comes whenever it is asked for. When nobody can go on, the rest are killed, as a launcher does.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from hpcllm.course.lab import LawError
from hpcllm.course.labs.checkpoint.forked import Call, End, GroupComm, Leave, Meeting, act, needed

LONGEST_S = 8.0  # between two requests of a rank
NO_SPACE = errno.ENOSPC
Deed = Literal["kill", "torn", "fail", "short", "hold"]  # torn: half a write, then killed; hold: no leave is given


@dataclass(frozen=True)
class Fault:
    """The fate of one call of one rank. index: of its calls; None: of every call."""

    rank: int
    deed: Deed
    index: int | None = None
    names: tuple[str, ...] = ()  # of calls; none: of all

    def hits(self, rank: int, index: int, call: Call) -> bool:
        is_named = not self.names or call.name in self.names
        return rank == self.rank and self.index in (None, index) and is_named


@dataclass
class Rank:
    """A rank as the scheduler sees it."""

    pid: int
    line: Connection
    request: Any = None
    end: End | None = None
    calls: list[Call] = field(default_factory=list)
    meetings: int = 0
    was_hit: bool = False
    is_held: bool = False
    is_dead: bool = False


@dataclass(frozen=True)
class Event:
    """A call that was made."""

    rank: int
    call: Call
    inode: int = 0  # of what the path named afterwards, or before it was removed
    returned: int = 0  # ranks that had returned before


@dataclass
class Run:
    """The outcome of a job. ends: of each rank; None: killed, or still waiting when the others had ended."""

    ends: list[End | None]
    events: list[Event]
    calls: list[list[Call]]  # of each rank, those that failed included
    was_hit: bool  # the fault came to pass
    waiting: list[str]  # of each rank, what it was in when nobody could go on; "" if it had ended

    def returned(self) -> list[int]:
        return [rank for rank, end in enumerate(self.ends) if end and end.how == "returned"]


class Job:
    """Ranks at work."""

    def __init__(
        self, size: int, work: Callable[[GroupComm], Any], order: Sequence[int], fault: Fault | None, asks: bool
    ) -> None:
        self.order, self.fault = order, fault
        self.events: list[Event] = []
        self.meetings: list[dict[int, Meeting]] = []
        self.ranks: list[Rank] = []
        for rank in range(size):
            self.ranks.append(self._start(rank, size, work, asks))

    def _start(self, rank: int, size: int, work: Callable[[GroupComm], Any], asks: bool) -> Rank:
        here, there = multiprocessing.Pipe()
        pid = os.fork()
        if not pid:
            here.close()
            act(there, rank, size, asks, work)
        there.close()
        return Rank(pid, here)

    def run(self) -> Run:
        """Let the ranks go on until none can."""
        try:
            while True:
                self._listen()
                if not self._meet() and not self._go_on():
                    return self._over()
        finally:
            for rank in self.ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                rank.line.close()

    def _over(self) -> Run:
        waiting = [str(getattr(rank.request, "name", "")) for rank in self.ranks]
        was_hit = any(rank.was_hit or rank.is_held for rank in self.ranks)
        return Run(
            [rank.end for rank in self.ranks], self.events, [rank.calls for rank in self.ranks], was_hit, waiting
        )

    def _listen(self) -> None:
        """Wait until each rank has asked for something, or ended."""
        for number, rank in enumerate(self.ranks):
            if rank.request or rank.end or rank.is_dead:
                continue
            if not rank.line.poll(LONGEST_S):
                raise LawError("endless", f"rank {number} of {len(self.ranks)} has not come back for {LONGEST_S:g} s")
            try:
                asked = rank.line.recv()
            except EOFError:
                asked = End("raised", "the process ended")
            if isinstance(asked, End):
                rank.end = asked
                if asked.how == "wrong":
                    raise LawError(*asked.value)
            else:
                rank.request = asked

    def _meet(self) -> bool:
        """Answer all meetings that can be: True if there was one."""
        went_on = False
        for number, rank in enumerate(self.ranks):
            if isinstance(rank.request, Meeting):
                if rank.meetings == len(self.meetings):
                    self.meetings.append({})
                here = self.meetings[rank.meetings]
                here[number] = rank.request
                self._compare(here)
        for number, rank in enumerate(self.ranks):
            if isinstance(rank.request, Meeting):
                here = self.meetings[rank.meetings]
                if all(other in here for other in needed(rank.request, number, len(self.ranks))):
                    values = [here[other].value if other in here else None for other in range(len(self.ranks))]
                    rank.request, rank.meetings, went_on = None, rank.meetings + 1, True
                    rank.line.send(values)
        return went_on

    def _compare(self, here: dict[int, Meeting]) -> None:
        kinds = {(meeting.name, meeting.root): rank for rank, meeting in here.items()}
        if len(kinds) > 1:
            words = " and ".join(f"rank {rank} in comm.{name}" for (name, _), rank in kinds.items())
            raise LawError("deadlock", f"{words} at the same time")

    def _go_on(self) -> bool:
        """Give leave to the first rank in order that asks for a call: True if there was one."""
        for number in self.order or sorted(range(len(self.ranks)), key=lambda rank: len(self.ranks[rank].calls)):
            rank = self.ranks[number]
            if isinstance(rank.request, Call) and not rank.is_held:
                self._decide(number, rank, rank.request)
                return True
        return False

    def _decide(self, number: int, rank: Rank, call: Call) -> None:
        index = len(rank.calls)
        rank.calls.append(call)
        deed = self.fault.deed if self.fault and self.fault.hits(number, index, call) else None
        rank.was_hit = rank.was_hit or deed is not None
        if deed == "hold":
            rank.calls.pop()
            rank.is_held = True
            return
        rank.request = None
        if deed != "kill":
            self._give_leave(number, rank, call, deed)
        if deed in ("kill", "torn"):
            os.kill(rank.pid, signal.SIGKILL)
            rank.is_dead = True

    def _give_leave(self, number: int, rank: Rank, call: Call, deed: Deed | None) -> None:
        before = _inode(call.path)
        rank.line.send(Leave(NO_SPACE if deed == "fail" else 0, deed in ("torn", "short")))
        if not rank.line.poll(LONGEST_S) or not rank.line.recv():
            return
        if deed in ("torn", "short"):
            call = call._replace(data=call.data[: len(call.data) // 2])
        inode = before if call.name in ("remove", "rename") else _inode(call.path)
        self.events.append(Event(number, call, inode or call.inode, sum(rank.end is not None for rank in self.ranks)))


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino if path else 0
    except OSError:
        return 0


def run(
    size: int,
    work: Callable[[GroupComm], Any],
    order: Sequence[int] = (),
    fault: Fault | None = None,
    asks: bool = True,
) -> Run:
    """Run a function on so many ranks. Raises LawError where it does not end, or meets itself.

    order: ranks that go on first; none: all in step. asks: about each call to the disk; meetings are always asked for.
    """
    return Job(size, work, order, fault, asks).run()
