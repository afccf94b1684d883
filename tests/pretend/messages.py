"""An MPI that uses its freedom: what a program may not rely on between the start of a message and its wait, it breaks.

    Isend                  returns at once; the bytes are read later, and must still be the same when the wait is over
    Irecv                  the memory is poison until the wait is over, and must still be that then; bytes come at the
                           wait alone
    Allreduce, Ibcast ...  the same from the call to its end: what the library fills is poison, what it reads stays
    wait                   which of several messages is over first is a matter of chance (of a seed)

Every communicator that is made once `watch` was called is a Communicator, whoever uses it. The pretended device, if
there is one, hears from when until when memory is read or filled.
"""

from __future__ import annotations

import atexit
import ctypes
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from pretend import seed

POISON = 0xFF
MOST_POLLS = 3  # by which a completion is late
LATEST_S = 0.02  # a send leaves by then, though its rank tests nothing
LARGEST_BYTES = 1 << 28  # what is longer is MPI's own matter: a copy of it would not fit
FRAMES = 5  # of a place, the innermost ones
Plain = MPI.Intracomm
PlainRequest = MPI.Request

faults: list[str] = []  # each with both of its sides; pretend.take_faults hands them over
_device: Any = None
_chance = random.Random(seed())
_lock = threading.RLock()
_waiting: deque[Message] = deque()  # sends that have not left, in their order
_under_way: dict[int, Message] = {}  # by id: MPI fills our copies, also when the program has given a message up
_thread: list[threading.Thread] = []  # that lets them leave, where MPI takes calls of several threads


class Use:
    """Use of memory by MPI, from its start to its end. buffer: mpi4py's; writes: MPI fills it."""

    def __init__(self, buffer: Any, writes: bool) -> None:
        parts = list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]
        self.kept, self.writes = MPI.buffer.frombuffer(parts[0], readonly=not writes), writes
        self.started = place("receive" if writes else "send")
        self.noted = self._begin()
        self.memory = _memory(self.kept.address, self.kept.nbytes)
        self.copy = self.memory.copy()  # what has to leave; or where arrives what comes, what is there meanwhile
        if writes:
            self.memory[:] = POISON
        handed = self.copy if writes else self.memory
        parts[0] = handed.view(parts[0].dtype) if isinstance(parts[0], np.ndarray) else handed
        self.buffer = parts if len(parts) > 1 else parts[0]  # for MPI, in place of the program's

    def end(self) -> None:
        if self.writes:
            if (self.memory != POISON).any():
                self._blame("memory of a receive was written before its wait")
            self.memory[:] = self.copy
        elif not np.array_equal(self.copy, self.memory):
            self._blame("memory of a send changed before its wait")
        if self.noted:
            _device.end_message(self.noted)

    def _begin(self) -> Any:
        address, size_bytes = self.kept.address, self.kept.nbytes
        if not (_device and size_bytes):
            return None
        is_devices = _device.behind(address) != address
        if is_devices:
            ctypes.string_at(address, 1)  # as MPI does: whose device is sealed dies of it
        watched = is_devices or _device.is_pinned(address)
        return _device.begin_message(address, size_bytes, self.writes) if watched else None

    def _blame(self, what: str) -> None:
        faults.append(f"{what}\n    now: {place('wait')}\n    before: {self.started}")


class Message(PlainRequest):
    """A send, a receive or a collective; over only in a test or wait of this rank, when its memory's use ends."""

    uses: Sequence[Use] = ()
    real: Any = None  # the request, once it has left
    start: Callable[[], Any]
    polls = 0

    def over(self, status: Any = None) -> bool:
        """Return true, once the message is complete, from then on for ever."""
        if self.polls < 0:
            return True
        leave()
        self.polls -= self.polls > 0
        if self.polls or self.real is None or not self.real.Test(status):
            return False
        for use in self.uses:
            use.end()
        self.polls, self.uses = -1, ()
        del _under_way[id(self)]
        return True

    def Test(self, status: Any = None) -> bool:  # noqa: N802
        return self.over(status)

    def Wait(self, status: Any = None) -> Literal[True]:  # noqa: N802
        while not self.over(status):
            time.sleep(0)
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: Any = None) -> bool:  # noqa: ARG003, N802
        ours, others = _sorted(requests)
        return all(message.over() for message in ours) and PlainRequest.Testall(others)

    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: Any = None) -> Literal[True]:  # noqa: ARG003, N802
        ours, others = _sorted(requests)
        while not all(message.over() for message in ours):
            time.sleep(0)
        return PlainRequest.Waitall(others)


class Communicator(Plain):
    """Communicator whose messages and collectives of buffers are watched; those made of it are such ones too."""

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:  # noqa: N802
        if _is_long(buf):
            leave()
            return super().Isend(buf, dest, tag)
        use, send = Use(buf, writes=False), super().Isend
        message = _message([use])
        message.start = lambda: send(use.buffer, dest, tag)
        with _lock:
            _waiting.append(message)
        if not _thread:
            leave()  # nobody else would, while this rank is in a call that blocks
        return message

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:  # noqa: N802
        if _is_long(buf):
            return super().Irecv(buf, source, tag)
        use = Use(buf, writes=True)
        message = _message([use])
        message.real = super().Irecv(use.buffer, source, tag)
        return message


ONE_BUFFER = ("Send", "Ssend", "Recv", "Bcast", "Ibcast")
_SUMS = "Allreduce Reduce Reduce_scatter Reduce_scatter_block Scan Exscan"
_MOVES = "Allgather Allgatherv Alltoall Alltoallv Gather Gatherv Scatter Scatterv"
TWO_BUFFERS = [form for name in f"{_SUMS} {_MOVES}".split() for form in (name, f"I{name.lower()}")]
IN_ORDER = ("send", "ssend", "isend", "issend", "Issend", "Sendrecv", "Free")  # behind messages that have not left
MAKERS = ("Clone", "Create", "Create_group", "Dup", "Dup_with_info", "Split", "Split_type")


def _using(name: str) -> Callable[..., Any]:
    """A call of the library whose first buffers are read, filled (second ones), or both, by chance of its root."""
    call, count = getattr(Plain, name), 1 if name in ONE_BUFFER else 2

    def method(self: Communicator, *arguments: Any, **keywords: Any) -> Any:
        handed, uses = list(arguments), list[Use]()
        leave()
        for at, buffer in enumerate(arguments[:count]):
            if buffer is None or isinstance(buffer, type(MPI.IN_PLACE)) or _is_long(buffer):
                continue
            root = keywords.get("root", (*arguments, 0)[1]) if name.endswith("cast") else -1
            uses.append(Use(buffer, writes=at == 1 or name == "Recv" or root not in (-1, self.rank)))
            handed[at] = uses[-1].buffer
        if name[0] == "I":
            message = _message(uses)
            message.real = call(self, *handed, **keywords)
            return message
        try:
            return call(self, *handed, **keywords)
        finally:
            for use in uses:
                use.end()

    return method


def _after_what_waits(name: str) -> Callable[..., Any]:
    call = getattr(Plain, name)

    def method(self: Communicator, *arguments: Any, **keywords: Any) -> Any:
        leave()
        return call(self, *arguments, **keywords)

    return method


def _making(name: str) -> Callable[..., Any]:
    call = getattr(Plain, name)

    def method(self: Communicator, *arguments: Any, **keywords: Any) -> Any:
        made = call(self, *arguments, **keywords)
        return made if isinstance(made, Communicator) else Communicator(made)

    return method


for _names, _make in (((*ONE_BUFFER, *TWO_BUFFERS), _using), (IN_ORDER, _after_what_waits), (MAKERS, _making)):
    for _name in _names:
        setattr(Communicator, _name, _make(_name))


def _message(uses: list[Use]) -> Message:
    message = Message()
    message.uses, message.polls = uses, _chance.randint(1, MOST_POLLS)
    _under_way[id(message)] = message
    return message


def _sorted(requests: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    ours = [one for one in requests if isinstance(one, Message)]
    return _chance.sample(ours, len(ours)), [one for one in requests if not isinstance(one, Message)]


def _is_long(buffer: Any) -> bool:
    first = buffer[0] if isinstance(buffer, (list, tuple)) else buffer
    return MPI.buffer.frombuffer(first, readonly=True).nbytes > LARGEST_BYTES


def _memory(address: int, size_bytes: int) -> Any:
    """(size_bytes,) uint8 of an address, where the values of the pretended device's are."""
    if not size_bytes:
        return np.empty(0, np.uint8)
    where = _device.behind(address) if _device else address
    return np.ctypeslib.as_array(ctypes.cast(where, ctypes.POINTER(ctypes.c_uint8)), (size_bytes,))


def leave() -> None:
    """Let all sends that were begun leave."""
    with _lock:
        while _waiting:
            message = _waiting.popleft()
            message.real = message.start()


def _leave_now_and_then() -> None:
    while True:
        time.sleep(LATEST_S)
        if not MPI.Is_finalized():
            leave()


def place(name: str) -> str:
    """`name` and the innermost lines of the project that led here, as the pretended device tells them (sites.h)."""
    lines, frame = list[str](), sys._getframe(1)
    walk: FrameType | None = frame
    while walk and len(lines) < FRAMES:
        file = walk.f_code.co_filename
        if ("/hpcllm/" in file or "/tests/" in file) and not ("/tests/pretend/" in file or "site-packages" in file):
            lines.append(f"\n        {file}:{walk.f_lineno} {walk.f_code.co_name}")
        walk = walk.f_back
    return name + "".join(lines)


def watch(device: Any) -> None:
    """Put this MPI below all communicators, for the rest of the process. device: the pretended one's native part."""
    global _device
    _device = device
    MPI.Intracomm, MPI.Request = Communicator, Message  # type: ignore[misc]
    MPI.COMM_WORLD, MPI.COMM_SELF = Communicator(MPI.COMM_WORLD), Communicator(MPI.COMM_SELF)  # type: ignore[misc]
    if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        _thread.append(threading.Thread(target=_leave_now_and_then, daemon=True))
        _thread[0].start()
    atexit.register(leave)
