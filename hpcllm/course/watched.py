"""A communicator for laws: late at random, without buffers, and with every message counted.

    Send, Isend ----> a short sleep, now and then ----> Ssend, Issend      ends once its receive is posted: a program
    Recv, Irecv ----> a short sleep, now and then ----> as they are        that needs MPI's buffers is in a deadlock
    Allreduce ... --> a short sleep, now and then ----> as they are        for labs that are not about making them

What a race, a missing wait or a lucky order gives right on most days, goes wrong here on most. All is real: messages go
through MPI, and any order that comes of the delays may come on a busy network, too.

For races a link can be set: then Send, Isend and Sendrecv of b bytes take b / link_bytes_per_s more, in which the rank
sleeps, so that its messages leave one after another, and the cores are free for others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from numbers import Integral
from typing import Any

from mpi4py import MPI

from hpcllm.course.lab import LawError

LATE_SHARE = 0.3  # of the calls
LONGEST_S = 2e-3


class WatchedComm(MPI.Intracomm):
    """A communicator whose messages are delayed, unbuffered, and counted."""

    delays: random.Random | None
    messages: int
    sent_bytes: int
    requests: list[MPI.Request]
    is_persistent = False  # some sends may start uncounted
    calls: list[tuple[str, int]]  # collectives, and the bytes of the longer of their arrays
    link_bytes_per_s: float | None  # of each rank's way out

    def waited_for(self) -> bool:
        """Return True if each request that was made has been completed by a wait or a test."""
        return all(request == MPI.REQUEST_NULL for request in self.requests)

    def restart_counts(self) -> None:
        self.messages, self.sent_bytes, self.requests, self.calls = 0, 0, [], []

    def keep(self) -> None:
        """Reject from now on what ends the communicator or the job."""
        for name in ("Abort", "Disconnect", "Free"):
            setattr(self, name, _rejecting(name, "not_yours"))

    def count(self, buffer: Any) -> None:
        self.messages += 1
        self.sent_bytes += _bytes_of(buffer)

    def be_late(self) -> None:
        """Sleep for a moment, now and then, for laws."""
        if self.delays and self.delays.random() < LATE_SHARE:
            time.sleep(self.delays.uniform(0, LONGEST_S))

    def pass_link(self, buffer: Any) -> None:
        """Sleep as long as the link takes, for races; the core is free for other ranks."""
        if self.link_bytes_per_s:
            time.sleep(_bytes_of(buffer) / self.link_bytes_per_s)


def watched(comm: MPI.Intracomm, forbidden: tuple[str, ...] = (), delays: random.Random | None = None) -> WatchedComm:
    """Make the same communicator watched. delays: of this rank's calls; None: neither delays nor unbuffered sends."""
    made = WatchedComm(comm)
    made.delays, made.link_bytes_per_s = delays, None
    made.restart_counts()
    for name in forbidden:
        setattr(made, name, _rejecting(name, "forbidden"))
    return made


def _bytes_of(buffer: Any) -> int:
    """Bytes of what is sent: an array, or [array, count, type] as mpi4py takes it."""
    spec = buffer if isinstance(buffer, list | tuple) else [buffer]
    data = spec[0]
    nbytes = getattr(data, "nbytes", None)
    whole = int(nbytes if nbytes is not None else memoryview(data).nbytes if data is not None else 0)
    counts = [int(each) for each in spec[1:] if isinstance(each, Integral)]
    return min(whole, counts[0] * int(getattr(data, "itemsize", 1))) if counts else whole


def _rejecting(name: str, hint: str) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise LawError(hint, f"the function calls comm.{name}")

    return method


def _sending(name: str, unbuffered: str) -> Callable[..., Any]:
    plain, strict = getattr(MPI.Intracomm, name), getattr(MPI.Intracomm, unbuffered)

    def method(self: WatchedComm, buf: Any, *arguments: Any, **keywords: Any) -> Any:
        self.count(buf)
        self.be_late()
        self.pass_link(buf)
        result = (strict if self.delays else plain)(self, buf, *arguments, **keywords)
        if result is not None:
            self.requests.append(result)
        return result

    return method


def _receiving(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Intracomm, name)

    def method(self: WatchedComm, *arguments: Any, **keywords: Any) -> Any:
        self.be_late()
        result = plain(self, *arguments, **keywords)
        if result is not None:
            self.requests.append(result)
        return result

    return method


def _joint(name: str) -> Callable[..., Any]:
    """Make a collective operation that counts as one message of what this rank puts in."""
    plain = getattr(MPI.Intracomm, name)

    def method(self: WatchedComm, sendbuf: Any, recvbuf: Any, *arguments: Any, **keywords: Any) -> Any:
        buffers = [buffer for buffer in (sendbuf, recvbuf) if buffer is not MPI.IN_PLACE]
        self.count(buffers[0])
        self.calls.append((name, max(map(_bytes_of, buffers))))
        self.be_late()
        result = plain(self, sendbuf, recvbuf, *arguments, **keywords)
        if result is not None:
            self.requests.append(result)
        return result

    return method


def _exchanging(self: WatchedComm, sendbuf: Any, *arguments: Any, **keywords: Any) -> None:
    self.count(sendbuf)
    self.be_late()
    self.pass_link(sendbuf)
    MPI.Intracomm.Sendrecv(self, sendbuf, *arguments, **keywords)


class _Persistent(MPI.Prequest):
    """A persistent send, counted each time that it starts by itself; Startall starts it unseen."""

    comm: WatchedComm
    buffer: Any

    def Start(self) -> None:  # noqa: N802 -- MPI's name
        self.comm.count(self.buffer)
        self.comm.be_late()
        super().Start()


def _persistent(self: WatchedComm, buf: Any, *arguments: Any, **keywords: Any) -> _Persistent:
    made = _Persistent(MPI.Intracomm.Send_init(self, buf, *arguments, **keywords))
    made.comm, made.buffer, self.is_persistent = self, buf, True
    return made


for _name, _strict in {"Send": "Ssend", "Ssend": "Ssend", "Isend": "Issend", "Issend": "Issend"}.items():
    setattr(WatchedComm, _name, _sending(_name, _strict))
for _name in ("Recv", "Irecv"):
    setattr(WatchedComm, _name, _receiving(_name))
for _name in ("Allreduce", "Iallreduce", "Reduce_scatter", "Ireduce_scatter", "Allgatherv", "Iallgatherv"):
    setattr(WatchedComm, _name, _joint(_name))
WatchedComm.Send_init = _persistent  # type: ignore[assignment,method-assign]
WatchedComm.Sendrecv = _exchanging  # type: ignore[assignment,method-assign]
