"""What a rank keeps between collectives: how long it waits, memory it works in, bytes it has sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.raw import Raw
from hpcllm.messages import buffers
from hpcllm.messages.memory import ALIGNMENT_BYTES, MessageMemory, memory_for, mpi_reads_devices
from hpcllm.waiting import Waits


@dataclass
class Wire:
    """Sends and receives of one kind of traffic. Not for two threads at once.

    waits: without a limit at first, so that a wait is MPI's own; whoever sets one gets StallError and polite polling.
    """

    waits: Waits = field(default_factory=lambda: Waits(limit_s=None))
    plain_bytes: int = 0  # what this rank's messages would have taken without a codec
    sent_bytes: int = 0  # what they took
    memory: MessageMemory = field(default_factory=MessageMemory)  # of the values that are summed or moved now
    _memories: dict[tuple[torch.device, bool], MessageMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._host = self.memory

    def turn_to(self, device: torch.device) -> MessageMemory:
        """The message memory for values on this device is `memory` from now on."""
        if device.type == "cpu":
            self.memory = self._host
        else:
            key = device, mpi_reads_devices()
            self.memory = self._memories.get(key) or self._memories.setdefault(key, memory_for(device))
        return self.memory

    def scratch(self, name: str, size_bytes: int) -> torch.Tensor:
        """Message memory: (size_bytes,) uint8, 64-byte aligned, that lives until the next call with this name."""
        return self.memory.scratch(name, size_bytes)

    def workspace(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to compute in: (n,) where the values are, that lives until the next call with this name."""
        return self.memory.workspace(name, n, dtype)

    def landing(self, name: str, x: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Message memory for the encoding of x (n,): what is raw goes straight to its place, if it can."""
        is_raw = isinstance(codec, Raw)
        return x.view(torch.uint8) if is_raw and x.numel() else self.scratch(name, codec.encoded_bytes(x.numel()))

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
    """Memory for messages on their way: `turns` times `count` slots, used in turn.

    Whoever takes the slots of a turn waits for the messages that used them before.
    """

    def __init__(self, wire: Wire, name: str, turns: int, count: int, slot_bytes: int, what: str) -> None:
        self.waits, self.what, self.count, self.turns = wire.waits, what, count, turns
        self.stride = padded(slot_bytes)
        self.memory = wire.scratch(name, turns * count * self.stride)
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
        """These requests use slots of that turn."""
        self.requests[turn % self.turns] += requests

    def wait(self, turn: int) -> None:
        """Until the messages of that turn are gone. Raises StallError."""
        held = self.requests[turn % self.turns]
        if held:
            self.waits.all(held, lambda: self.what)
            held.clear()

    def wait_all(self) -> None:
        for turn in range(self.turns):
            self.wait(turn)


def padded(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
