"""Messages of one rank: how long it waits for them, the memory they lie in, the bytes it has sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.mpi import buffers
from hpcllm.mpi.message_memory import ALIGNMENT_BYTES, MessageMemory, memory_for, mpi_reads_devices
from hpcllm.mpi.wait import Waits


@dataclass
class Wire:
    """Sends and receives of one kind of traffic. Not for two threads at once.

    waits: without a limit at first, so that a wait is MPI's own; whoever sets one gets StallError and polite polling.
    """

    waits: Waits = field(default_factory=lambda: Waits(limit_s=None))
    plain_bytes: int = 0  # bytes that this rank's messages would have taken without a codec
    sent_bytes: int = 0  # bytes that they took
    memory: MessageMemory = field(default_factory=MessageMemory)  # for values where those of the present call are
    _memories: dict[tuple[torch.device, bool], MessageMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._host = self.memory

    def turn_to(self, device: torch.device) -> MessageMemory:
        """Make the message memory for values on this device `memory`, and return it."""
        self.waits.poll_for(device.type)
        if device.type == "cpu":
            self.memory = self._host
        else:
            key = device, mpi_reads_devices()
            self.memory = self._memories.get(key) or self._memories.setdefault(key, memory_for(device))
            self.memory.settle = self.waits.settle
        return self.memory

    def landing(self, name: str, x: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Message memory for the encoding of x (n,): raw values go straight to their place, if they can."""
        if isinstance(codec, Raw) and x.numel():
            return x.view(torch.uint8)
        return self.memory.scratch(name, codec.encoded_bytes(x.numel()))

    def send(self, comm: MPI.Intracomm, data: torch.Tensor, peer: int, tag: int, plain_bytes: int) -> list[MPI.Request]:
        """Start sending `data`, message memory; plain_bytes: what the values in it take without a codec."""
        self.memory.before_send(data)
        self.sent_bytes += data.nbytes
        self.plain_bytes += plain_bytes
        return buffers.isend(comm, data, peer, tag)

    def receive(self, comm: MPI.Intracomm, data: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
        """Start receiving into `data`, message memory, which may be longer than what comes."""
        self.memory.before_receive(data)
        return buffers.irecv(comm, data, peer, tag)

    def exchange(
        self, comm: MPI.Intracomm, data: torch.Tensor, to: int, landing: torch.Tensor, source: int, plain_bytes: int,
        what: Callable[[], str],
    ) -> None:  # fmt: skip
        """Send `data` to one rank while `landing` fills from another, and wait for both. Raises StallError."""
        requests = self.receive(comm, landing, source, 0) + self.send(comm, data, to, 0, plain_bytes)
        self.waits.all(requests, what)


class Slots:
    """Memory for messages under way: `turns` times `count` slots, used in turn.

    Whoever takes the slots of a turn waits for the messages that used them before.
    """

    def __init__(self, wire: Wire, name: str, turns: int, count: int, slot_bytes: int, what: str) -> None:
        self.waits, self.what, self.count, self.turns = wire.waits, what, count, turns
        self.stride = padded(slot_bytes)
        self.memory = wire.memory.scratch(name, turns * count * self.stride)
        self.requests: list[list[MPI.Request]] = [[] for _ in range(turns)]

    def take(self, turn: int, place: int, size_bytes: int) -> torch.Tensor:
        """(size_bytes,) uint8: a slot of a turn, counted on and on, that nothing uses any more (see wait)."""
        start = (turn % self.turns * self.count + place) * self.stride
        return self.memory[start : start + size_bytes]

    def rows(self, turn: int) -> torch.Tensor:
        """(count, stride): all slots of a turn."""
        row_bytes = self.count * self.stride
        return self.memory[turn % self.turns * row_bytes :][:row_bytes].view(self.count, self.stride)

    def hold(self, turn: int, requests: list[MPI.Request]) -> None:
        """Note that these requests use slots of that turn."""
        self.requests[turn % self.turns] += requests

    def wait(self, turn: int) -> None:
        """Return when the messages of that turn are gone. Raises StallError."""
        held = self.requests[turn % self.turns]
        if held:
            self.waits.all(held, lambda: self.what)
            held.clear()

    def wait_all(self) -> None:
        for turn in range(self.turns):
            self.wait(turn)


class Packed:
    """Encoded pieces one behind another, so that many travel as one message, in the order added or received.

    memory   [piece 0 .....][piece 1 ...][piece 2 ......][ room for what comes next
             ^0             ^ends[1]     ^ends[2]        ^ends[3]      each starts at a multiple of 64 bytes
    """

    def __init__(self, wire: Wire, codec: Codec, lengths: Iterable[int]) -> None:
        """lengths: values of all pieces that will ever be in it."""
        self.codec = codec
        self.memory = wire.memory.scratch("packed", _room_bytes(codec, lengths))
        self.ends = [0]
        self.used: list[int] = []

    def add(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Encode one more piece; returns its bytes."""
        slot = self.memory[self.ends[-1] :]
        data = self.codec.encode(values, slot, index) if values.numel() else slot[:0]
        if data.data_ptr() != slot.data_ptr():
            slot[: data.numel()].copy_(data)
        self._append(data.numel())
        return self.piece(-1)

    def front(self, pieces: int) -> torch.Tensor:
        """Bytes of the first pieces, to be sent."""
        return self.memory[: self.ends[pieces]]

    def room(self, lengths: Iterable[int]) -> torch.Tensor:
        """Memory in which pieces of these lengths can be received."""
        end = self.ends[-1]
        return self.memory[end : end + _room_bytes(self.codec, lengths)]

    def received(self, lengths: Iterable[int]) -> None:
        """Append pieces of these lengths that have come in the room. Raises CodecError."""
        for n in lengths:
            self._append(self.codec.used_bytes(self.memory[self.ends[-1] :], n) if n else 0)

    def piece(self, number: int) -> torch.Tensor:
        start = self.ends[:-1][number]
        return self.memory[start : start + self.used[number]]

    def _append(self, used_bytes: int) -> None:
        self.used.append(used_bytes)
        self.ends.append(self.ends[-1] + padded(used_bytes))


def padded(size_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _room_bytes(codec: Codec, lengths: Iterable[int]) -> int:
    """Bytes that pieces take at most; an empty one is no message, whatever its code's header would be."""
    return sum(padded(codec.encoded_bytes(n)) for n in lengths if n)
