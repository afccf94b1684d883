"""What a rank keeps between collectives: how long it waits, memory it works in, bytes it has sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from hpcllm import buffers
from hpcllm.waiting import Waits

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register


@dataclass
class Wire:
    """Sends and receives of one kind of traffic. Not for two threads at once.

    waits: without a limit at first, so that a wait is MPI's own; whoever sets one gets StallError and polite polling.
    """

    waits: Waits = field(default_factory=lambda: Waits(limit_s=None))
    plain_bytes: int = 0  # what this rank's messages would have taken without a codec
    sent_bytes: int = 0  # what they took
    _memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def scratch(self, name: str, size_bytes: int) -> torch.Tensor:
        """(size_bytes,) uint8, 64-byte aligned, that lives until the next call with this name; grows, never shrinks."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size_bytes:
            memory = self._memory[name] = _aligned(size_bytes)
        return memory[:size_bytes]

    def send(self, comm: MPI.Intracomm, data: torch.Tensor, peer: int, tag: int, plain_bytes: int) -> list[MPI.Request]:
        """Start sending `data`; plain_bytes: what the values in it take without a codec."""
        self.sent_bytes += data.nbytes
        self.plain_bytes += plain_bytes
        return buffers.isend(comm, data, peer, tag)

    def receive(self, comm: MPI.Intracomm, data: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
        """Start receiving into `data`, which may be longer than what comes."""
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


def _aligned(size_bytes: int) -> torch.Tensor:
    memory = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:size_bytes]
