"""One rank of thousands: the loops of a sum run against a communicator that counts messages and brings zeros.

    sum  --Isend, Irecv-->  CountingComm      bytes and peers counted, every message complete at once
         <--what was asked: zero bytes-----   which every codec of fixed length decodes

Messages that are sent go nowhere, so what a rank sends does not depend on the others, and one rank is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpcllm.codecs import find_codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Wire
from hpcllm.mpi.message_memory import MessageMemory


class Done:
    """A request that is complete."""


@dataclass
class CountingComm:
    """Communicator of `size` ranks that counts what this one sends and receives."""

    size: int
    rank: int
    sent: list[tuple[int, int]] = field(default_factory=list)  # peer, bytes
    received: list[tuple[int, int]] = field(default_factory=list)

    def Isend(self, message, peer, _tag):  # noqa: N802 -- MPI's name
        self.sent.append((peer, memoryview(message[0]).nbytes))
        return Done()

    def Irecv(self, message, peer, _tag):  # noqa: N802 -- MPI's name
        memoryview(message[0]).cast("B")[:] = bytes(memoryview(message[0]).nbytes)
        self.received.append((peer, memoryview(message[0]).nbytes))
        return Done()


class NoWaits:
    """Waits for what is complete."""

    limit_s = None

    def all(self, requests, what):
        pass


class CountedMemory(MessageMemory):
    """Message memory that knows how much of it there is."""

    def bytes(self) -> int:
        return sum(memory.numel() for memory in self._named.values())


def counted_sum(function, ranks: int, rank: int, n: int, codec: str) -> tuple[CountingComm, int, torch.Tensor]:
    """Run an allreduce of n values of `ranks` ranks as that rank; its messages, its scratch memory and its x."""
    comm = CountingComm(ranks, rank)
    group = Group(comm, comm, comm, (1,))
    group.wire = Wire(NoWaits(), memory=CountedMemory())
    x = torch.ones(n)
    function(x, group, find_codec(codec))
    return comm, group.wire.memory.bytes(), x
