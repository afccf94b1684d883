"""An MPI that uses its freedom: what a program may not rely on between the start of a message and its wait, it breaks.

    isend     returns at once; the bytes are read later, and must still be the same when the wait is over
    irecv     the memory is poison until the wait is over, and must still be that then; bytes come at the wait alone
    wait      which of several messages is over first is a matter of chance (of a seed)

For tests on the pretend device: hpcllm.mpi.buffers is where all of its messages of tensors start.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from pretend import seed

POISON = 0xFF
MOST_POLLS = 3  # by which a completion is late
LATEST_S = 0.02  # a send leaves by then, though its rank tests nothing
Real = MPI.Request


class Message(Real):
    """A send or a receive of bytes at an address; done only in a test or wait of this rank."""

    real: Any = None  # the request, once it has left
    start: Callable[[], Any]
    end: Callable[[Any], None]
    polls = 0

    def over(self) -> bool:
        """True, once, when the message is complete and `end` has been called; then true for ever."""
        if self.polls < 0:
            return True
        _leave()
        self.polls -= self.polls > 0
        status = MPI.Status()
        if self.polls or self.real is None or not self.real.Test(status):
            return False
        self.end(status)
        self.polls = -1
        return True

    def Test(self, status: Any = None) -> bool:  # noqa: ARG002, N802
        return self.over()

    def Wait(self, status: Any = None) -> Literal[True]:  # noqa: ARG002, N802
        while not self.over():
            time.sleep(0)
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: Any = None) -> bool:  # noqa: ARG003, N802
        ours, others = _sorted(requests)
        return all(message.over() for message in ours) and Real.Testall(others)

    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: Any = None) -> Literal[True]:  # noqa: ARG003, N802
        ours, others = _sorted(requests)
        while not all(message.over() for message in ours):
            time.sleep(0)
        return Real.Waitall(others)


_chance = random.Random(seed())
_lock = threading.RLock()
_waiting: deque[Message] = deque()  # sends that have not left, in their order


def _sorted(requests: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    ours = [one for one in requests if isinstance(one, Message)]
    return _chance.sample(ours, len(ours)), [one for one in requests if not isinstance(one, Message)]


def _leave() -> None:
    with _lock:
        while _waiting:
            message = _waiting.popleft()
            message.real = message.start()


def _leave_now_and_then() -> None:
    while True:
        time.sleep(LATEST_S)
        if not MPI.Is_finalized():
            _leave()


class Watch:
    """The messages of hpcllm.mpi.buffers, begun by this MPI; native: the pretend device, which hears of each."""

    def __init__(self, native: Any, buffers: Any) -> None:
        self.native, self.buffers, self.plain_buffer = native, buffers, buffers.as_buffer

    def isend(self, comm: Any, tensor: Any, peer: int, tag: int) -> list[Message]:
        return [self._send(comm, *piece, peer, tag) for piece in self._pieces(tensor)]

    def irecv(self, comm: Any, tensor: Any, peer: int, tag: int) -> list[Message]:
        return [self._receive(comm, *piece, peer, tag) for piece in self._pieces(tensor)]

    def as_buffer(self, tensor: Any) -> Any:
        """Memory for a call that blocks, or nearly: what the stream has to do with it must be over now."""
        if tensor.numel() and self._is_watched(tensor.data_ptr()):
            self.native.touch_by_host(tensor.data_ptr(), tensor.nbytes, False)
        return self.plain_buffer(tensor)

    def _send(self, comm: Any, address: int, memory: Any, peer: int, tag: int) -> Message:
        message, before = Message(), memory.copy()
        noted = self._begun(address, memory.size, writes=False)

        def end(_: Any) -> None:
            if not np.array_equal(before, memory):
                self.native.note("memory of a send changed before its wait")
            self._ended(noted)

        message.start, message.end = lambda: comm.Isend([memory, MPI.BYTE], peer, tag), end
        message.polls = _chance.randint(1, MOST_POLLS)
        with _lock:
            _waiting.append(message)
        return message

    def _receive(self, comm: Any, address: int, memory: Any, peer: int, tag: int) -> Message:
        message, landing = Message(), np.empty(memory.size, np.uint8)
        noted = self._begun(address, memory.size, writes=True)
        memory[:] = POISON

        def end(status: Any) -> None:
            if (memory != POISON).any():
                self.native.note("memory of a receive was written before its wait")
            came = status.Get_count(MPI.BYTE)
            memory[:came] = landing[:came]
            self._ended(noted)

        message.end, message.polls = end, _chance.randint(1, MOST_POLLS)
        message.real = comm.Irecv([landing, MPI.BYTE], peer, tag)
        return message

    def _pieces(self, tensor: Any) -> list[tuple[int, Any]]:
        """Addresses of a message's pieces, and their memory where the host may touch it."""
        tensor, largest = self.buffers.as_bytes(tensor), self.buffers.LARGEST_MESSAGE_BYTES
        starts = range(0, tensor.nbytes, largest)
        return [self._memory(tensor.data_ptr() + start, min(tensor.nbytes - start, largest)) for start in starts]

    def _memory(self, address: int, size_bytes: int) -> tuple[int, Any]:
        pointer = ctypes.cast(self.native.behind(address), ctypes.POINTER(ctypes.c_uint8))
        return address, np.ctypeslib.as_array(pointer, (size_bytes,))

    def _is_watched(self, address: int) -> bool:
        return bool(self.native.behind(address) != address or self.native.is_pinned(address))

    def _begun(self, address: int, size_bytes: int, writes: bool) -> Any:
        return self.native.begin_message(address, size_bytes, writes) if self._is_watched(address) else None

    def _ended(self, noted: Any) -> None:
        if noted:
            self.native.end_message(noted)


def watch(native: Any, buffers: Any) -> None:
    """Put this MPI below hpcllm.mpi.buffers, for the rest of the process."""
    watch = Watch(native, buffers)
    buffers.isend, buffers.irecv, buffers.as_buffer = watch.isend, watch.irecv, watch.as_buffer
    MPI.Request = Message  # type: ignore[misc]
    threading.Thread(target=_leave_now_and_then, daemon=True).start()
