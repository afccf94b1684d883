"""Message memory: the place of the bytes of messages, and the order of a device's stream and MPI.

    values on      bytes of messages in             to a message            from a message
    the CPU        ordinary memory                  encode                  decode
    a device       its own memory, if MPI may       encode, record          decode, record
                   read that (gpu_aware.py)
    a device       pinned host memory, if not       encode, copy, record    copy, record, decode

MPI knows no streams, and a stream knows no MPI. So whatever is queued on the stream for a piece of message memory is
followed by an event (StreamEvents), and a message that reads or fills the piece starts when the event has passed. A
piece of named memory without an event was last used before this call began: so messages can arrive while the device
still computes what is to be sent. Of any other memory nothing is known, and all earlier work is waited for. In one step
of an algorithm many encodings are queued before the first of them is waited for, so the copy of one runs while another
is on the wire. The pipeline waits for no event: it asks (is_ready), and starts the message when the answer is yes.

Named memory grows and never shrinks: pinning takes long, and a GPU-aware MPI that maps a device's memory into other
processes may keep the handle of every address that it has ever seen (OLCF, "Frontier User Guide", on
MPICH_GPU_IPC_ENABLED). So what is encoded, and what the pipeline sends, is never in the allocator's short-lived memory.
Arrays that a caller hands to a raw collective are in messages themselves: gradients and weights, which live as long as
the run, and activations that tp sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec, SumEncoder
from hpcllm.codecs.tiles import TileLayout

T = TypeVar("T")
ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_mpi = {"reads devices": False}  # of this process


def let_mpi_read_devices(direct: bool) -> None:
    """Place messages of device tensors on the device from now on, or not; gpu_aware.py finds out, alike on all ranks.

    Without a call they lie on the host, which every MPI can read.
    """
    _mpi["reads devices"] = direct


def mpi_reads_devices() -> bool:
    return _mpi["reads devices"]


class Settle(Protocol):
    """Way in which the host makes a call that blocks until the device has come so far: see Waits.settle."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Return the result of the call."""


def _plainly(call: Callable[[], T], /) -> T:
    return call()


class MessageMemory:
    """Message memory of values on the CPU: ordinary memory, and nothing to wait for. Not for two threads at once."""

    place = "cpu"  # type of the device whose memory it is

    def __init__(self) -> None:
        self._named: dict[str, torch.Tensor] = {}
        self.settle: Settle = _plainly  # how the host waits for a device

    def scratch(self, name: str, size_bytes: int) -> torch.Tensor:
        """Return (size_bytes,) uint8 for MPI, 64-byte aligned, valid until the next call with the name."""
        return self._grown(name, size_bytes, self.allocate)

    def workspace(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return (n,) where the values are, valid until the next call with the name."""
        return self.scratch(name, n * dtype.itemsize).view(dtype)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return new (size_bytes,) uint8 that MPI may read and fill, for a pool of the caller's."""
        memory = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:size_bytes]

    def staged(self, codec: Codec) -> Codec:
        """Return the codec with its bytes in message memory."""
        return codec

    def before_send(self, data: torch.Tensor) -> None:
        """Return when the stream has written this message memory, so that MPI may read it."""

    def before_receive(self, data: torch.Tensor) -> None:
        """Return when the stream is done with this message memory, so that MPI may fill it."""

    def is_ready(self, data: torch.Tensor) -> bool:  # noqa: ARG002
        """Return true once the stream is done with this message memory, so that MPI may use it; never waits."""
        return True

    def record(self, data: torch.Tensor) -> None:
        """Note that all that the stream has to do with this message memory is queued by now."""

    def unused(self, data: torch.Tensor) -> None:
        """Note that this call has queued nothing yet that uses this named memory."""

    def enter(self) -> None:
        """Begin a call, perhaps on another stream than the last one."""

    def leave(self) -> None:
        """End a call. Nothing that the stream does with message memory after this is recorded."""

    def _grown(self, name: str, size_bytes: int, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
        memory = self._named.get(name)
        if memory is None or memory.numel() < size_bytes:
            if memory is not None and not memory.is_cpu:  # a call on another stream than it was taken on may have been
                memory.record_stream(torch.accelerator.current_stream(memory.device))  # the last to use it
            memory = self._named[name] = allocate(size_bytes)
        return memory[:size_bytes]


class DeviceMemory(MessageMemory):
    """Message memory of values on one device. direct: MPI may access it, else messages lie in pinned host memory."""

    def __init__(self, device: torch.device, direct: bool) -> None:
        super().__init__()
        self.device, self.direct, self.place = device, direct, device.type if direct else "cpu"
        self.events = StreamEvents(device)
        self.echo: tuple[int, torch.Tensor] | None = None  # an address, and on the device the bytes that went there
        self._last = torch.Event(device, enable_timing=False)  # of the last call, or of this one's last codec
        self._taken = torch.Event(device, enable_timing=False)  # of new memory, which may have been other tensors'
        self._has_begun = True  # this call has a codec already
        self._knows_all = False  # the codec notes whatever uses message memory

    def workspace(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self._grown(f"{name}, on the device", n * dtype.itemsize, self._on_device).view(dtype)

    def pinned(self, name: str, size_bytes: int) -> torch.Tensor:
        """Return (size_bytes,) uint8 on the host, wherever messages lie, valid until the next call with the name."""
        return self._grown(f"{name}, on the host", size_bytes, _pinned)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return self._on_device(size_bytes) if self.direct else _pinned(size_bytes)

    def staged(self, codec: Codec) -> Codec:
        if self._has_begun and not (self._knows_all and self.events.is_empty):
            self._last.record(torch.accelerator.current_stream(self.device))
        self.events.clear()  # an algorithm records nothing that is raw and direct, and may have done such before
        self._has_begun, self._knows_all = True, not (self.direct and isinstance(codec, Raw))
        return StagedCodec(codec, self) if self._knows_all else codec

    def before_send(self, data: torch.Tensor) -> None:
        self.events.wait(data, self.settle)

    def before_receive(self, data: torch.Tensor) -> None:
        if self._knows_all:
            self.unused(data)
        self.events.wait(data, self.settle)
        self._forget_echo(data)

    def unused(self, data: torch.Tensor) -> None:
        if not self.events.knows(data):
            self.settle(self._last.synchronize)
            self.settle(self._taken.synchronize)
            self.events.set_passed(data)

    def is_ready(self, data: torch.Tensor) -> bool:
        if not self.events.have_passed(data):
            return False
        self._forget_echo(data)
        return True

    def record(self, data: torch.Tensor) -> None:
        self.events.record(data)

    def enter(self) -> None:
        self._last.wait(torch.accelerator.current_stream(self.device))
        self._has_begun = False

    def leave(self) -> None:
        self.events.clear()  # the memory may be a caller's, who does with it what nobody records
        self._knows_all = False
        self._last.record(torch.accelerator.current_stream(self.device))

    def _forget_echo(self, data: torch.Tensor) -> None:
        """Forget what went to this memory, which a message may fill from now on."""
        start, end = span(data)
        if self.echo and start <= self.echo[0] < end:
            self.echo = None

    def _on_device(self, size_bytes: int) -> torch.Tensor:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self._taken.record(torch.accelerator.current_stream(self.device))
        return memory


class StagedCodec:
    """Codec for values of a device whose bytes are message memory, of the device or of the host; see codecs/protocol.

    All that the stream does with those bytes is recorded by events.
    """

    def __init__(self, codec: Codec, memory: DeviceMemory) -> None:
        self.codec, self.memory = codec, memory
        self.name, self.dtype, self.block = codec.name, codec.dtype, codec.block
        self.lossless, self.fixed_rate = codec.lossless, codec.fixed_rate

    def encoded_bytes(self, n: int) -> int:
        return self.codec.encoded_bytes(n)

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        if data.is_cpu and isinstance(self.codec, TileLayout):
            return self.codec.header_bytes(data, n)  # the header is read where it lies; the device is not waited for
        if self.fixed_rate:
            return self.codec.used_bytes(data, n)
        return self.memory.settle(lambda: self.codec.used_bytes(data, n))

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        if self.memory.direct:
            data = self._encoded(values, out, index)
        else:
            is_raw = isinstance(self.codec, Raw)
            room = self._room("encoded", 0 if is_raw else self.encoded_bytes(values.numel()))
            encoded = self._encoded(values, room, index)
            data = out[: encoded.numel()]
            data.copy_(encoded, non_blocking=True)
            self.memory.echo = None if is_raw else (data.data_ptr(), encoded)
        self.memory.record(data)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        if isinstance(self.codec, Raw) and out.dtype == self.dtype and data.nbytes == out.nbytes:
            out.copy_(data.view(self.dtype), non_blocking=True)  # straight to its place
        else:
            self.codec.decode(self._on_device(data), out)
        self.memory.record(data)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.decode_add(self._on_device(data), out)
        self.memory.record(data)

    @property
    def sums(self) -> bool:
        """True if the codec adds up encodings in one kernel: see sum_encode."""
        return hasattr(self.codec, "sum_encode")

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0
    ) -> torch.Tensor:
        """Encode a sum, see codecs.protocol.SumEncoder; parts and out are message memory."""
        codec: SumEncoder = self.codec  # type: ignore[assignment]
        if self.memory.direct:
            data = codec.sum_encode(parts, own_rank, own, out, index)
        else:
            rows, used_bytes = self._room("addends", parts.numel()).view(parts.shape), self.encoded_bytes(own.numel())
            for rank in range(parts.shape[0]):
                if rank != own_rank:
                    rows[rank, :used_bytes].copy_(parts[rank, :used_bytes], non_blocking=True)
            encoded = codec.sum_encode(rows, own_rank, own, self._room("encoded", out.numel()), index)
            data = out[: encoded.numel()]
            data.copy_(encoded, non_blocking=True)
            self.memory.echo = None
        self.memory.record(parts)
        self.memory.record(data)
        return data

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.codec.bound(values)

    def _on_device(self, data: torch.Tensor) -> torch.Tensor:
        """Return the bytes where the codec can read them; what was last encoded is still there."""
        if self.memory.direct:
            return data
        echo = self.memory.echo
        if echo and echo[0] == data.data_ptr() and echo[1].numel() == data.numel():
            return echo[1]
        room = self._room("arrived", data.numel())
        room.copy_(data, non_blocking=True)
        return room

    def _encoded(self, values: torch.Tensor, out: torch.Tensor, index: int) -> torch.Tensor:
        """Return the encoding of values; where its length depends on them, the host reads it from the device."""
        if self.fixed_rate:
            return self.codec.encode(values, out, index)
        return self.memory.settle(lambda: self.codec.encode(values, out, index))

    def _room(self, name: str, size_bytes: int) -> torch.Tensor:
        return self.memory.workspace(name, size_bytes, torch.uint8)


def memory_for(device: torch.device) -> MessageMemory:
    """Return new message memory for values on this device."""
    return MessageMemory() if device.type == "cpu" else DeviceMemory(device, mpi_reads_devices())


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class StreamEvents:
    """Events on pieces of memory of one device, or of pinned memory that it uses: when the stream is done there.

    memory    0 ....[####].......[########]......   pieces that do not overlap; one that is recorded again, or across
                    event         event             several, takes the younger event for all of it

    record after work on a piece was queued; wait, or ask, before MPI, which knows no streams, uses it. Not for two
    threads at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._events: list[torch.Event | None] = []  # None: has passed
        self._spare: list[torch.Event] = []

    def record(self, data: torch.Tensor) -> None:
        """Note that work on `data`, contiguous, was queued on the current stream."""
        start, end = span(data)
        if start == end:
            return
        first, last = self._overlapping(start, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [start], [end], [self._recorded()])

    def wait(self, data: torch.Tensor, settle: Settle = _plainly) -> None:
        """Return when the stream is done with `data`; where that is not known, with all that is queued so far."""
        start, end = span(data)
        first, last = self._overlapping(start, end)
        for place in range(first, last):
            event = self._events[place]
            if event is not None:
                settle(event.synchronize)
                self._spare.append(event)
                self._events[place] = None
        if first == last and start < end:
            event = self._recorded()
            settle(event.synchronize)
            self._spare.append(event)

    def have_passed(self, data: torch.Tensor) -> bool:
        """Return true once the stream is done with `data`; where that is not known, with all queued at the first call.

        Never waits.
        """
        start, end = span(data)
        first, last = self._overlapping(start, end)
        if first == last and start < end:
            self.record(data)
            first, last = self._overlapping(start, end)
        for place in range(first, last):
            event = self._events[place]
            if event is not None:
                if not event.query():
                    return False
                self._spare.append(event)
                self._events[place] = None
        return True

    @property
    def is_empty(self) -> bool:
        """True if no piece was noted."""
        return not self._starts

    def knows(self, data: torch.Tensor) -> bool:
        """Return true if work on a piece that shares memory with `data` was noted, or there is nothing in it."""
        start, end = span(data)
        first, last = self._overlapping(start, end)
        return first < last or start == end

    def set_passed(self, data: torch.Tensor) -> None:
        """Note that the stream is done with `data`, of which no piece was noted."""
        start, end = span(data)
        first, last = self._overlapping(start, end)
        self._replace(first, last, [start], [end], [None])

    def clear(self) -> None:
        """Forget all pieces."""
        self._replace(0, len(self._starts), [], [], [])

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of indices of pieces that share memory with [start, end)."""
        return bisect_right(self._ends, start), bisect_left(self._starts, end)

    def _replace(
        self, first: int, last: int, starts: list[int], ends: list[int], events: list[torch.Event | None]
    ) -> None:
        self._spare += [event for event in self._events[first:last] if event is not None]
        self._starts[first:last], self._ends[first:last], self._events[first:last] = starts, ends, events

    def _recorded(self) -> torch.Event:
        """Return an event recorded at the end of the current stream's queue."""
        event = self._spare.pop() if self._spare else torch.Event(self.device, enable_timing=False)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def span(data: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a contiguous tensor and the one behind it."""
    return data.data_ptr(), data.data_ptr() + data.nbytes
