"""`binomial` and `ring` broadcasts: the root encodes once, every rank forwards the bytes, then decodes them.

    binomial, 8 ranks, root 0           ring
    0 -> 4, 2, 1                        0 -> 1 -> 2 -> 3 -> ...      segments follow each other: one x on the wire,
         4 -> 6, 5                                                   plus a segment for each rank
              6 -> 7
    log2(ranks) levels: for small x     for large x

A rank keeps a segment's bytes in one of DEPTH slots until they are forwarded and decoded, and has posted the receives
of the segments that follow.
Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.2.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Slots
from hpcllm.mpi.partition import whole_blocks

DEPTH = 4
TREE_VALUES = 1 << 20  # a segment of the binomial tree
CHAIN_VALUES = 1 << 17  # a segment of the ring: short, since each rank adds one to the time


def binomial_broadcast(x: torch.Tensor, root: int, group: Group, codec: Codec) -> None:
    """root's x (n,) to every rank, in place. Collective over group. Raises StallError, CodecError."""
    relative = (group.rank - root) % group.size
    lowest = relative & -relative or 1 << (group.size - 1).bit_length()
    children = [relative + (1 << k) for k in reversed(range(lowest.bit_length() - 1))]
    _forward(x, root, relative & (relative - 1), children, TREE_VALUES, group, codec)


def ring_broadcast(x: torch.Tensor, root: int, group: Group, codec: Codec) -> None:
    """root's x (n,) to every rank, in place. Collective over group. Raises StallError, CodecError."""
    relative = (group.rank - root) % group.size
    _forward(x, root, relative - 1, [relative + 1], CHAIN_VALUES, group, codec)


def _forward(
    x: torch.Tensor, root: int, parent: int, children: list[int], segment_values: int, group: Group, codec: Codec
) -> None:
    """Receive from the parent and send to the children, segment by segment.

    parent, children: ranks counted from the root; children past the last rank do not exist.
    """
    if group.size == 1 or not x.numel():
        return
    is_root = group.rank == root
    tree = _Tree(x, (parent + root) % group.size, segment_values, group, codec)
    below = [(child + root) % group.size for child in children if child < group.size]
    for segment in range(DEPTH if not is_root else 0):
        tree.receive(segment)
    for segment in range(tree.segments):
        data = tree.encode(segment) if is_root else tree.arrived(segment)
        tree.send(segment, data, below)
        if not (is_root and codec.lossless):
            codec.decode(data, tree.part(segment))
        if segment and not is_root:
            tree.receive(segment - 1 + DEPTH)  # into the slot before this one, whose bytes have had time to leave
    tree.slots.wait_all()


class _Tree:
    """One rank's segments, and their slots."""

    def __init__(self, x: torch.Tensor, parent: int, segment_values: int, group: Group, codec: Codec) -> None:
        self.x, self.parent, self.group, self.codec = x, parent, group, codec
        self.raw = isinstance(codec, Raw)
        self.length = whole_blocks(min(segment_values, x.numel()), codec.block)
        self.segments = -(-x.numel() // self.length)
        slot_bytes = 0 if self.raw else codec.encoded_bytes(self.length)
        what = f"bytes of a broadcast over {group.size} ranks to go"
        self.slots = Slots(group.wire, "broadcast", DEPTH, 1, slot_bytes, what)
        self.receiving: dict[int, list[MPI.Request]] = {}

    def part(self, segment: int) -> torch.Tensor:
        return self.x[segment * self.length : (segment + 1) * self.length]

    def encode(self, segment: int) -> torch.Tensor:
        self.slots.wait(segment)
        return self.codec.encode(self.part(segment), self._landing(segment), segment * self.length)

    def receive(self, segment: int) -> None:
        if segment < self.segments:
            self.slots.wait(segment)
            self.receiving[segment] = self.group.wire.receive(self.group.comm, self._landing(segment), self.parent, 0)

    def arrived(self, segment: int) -> torch.Tensor:
        group, landing = self.group, self._landing(segment)
        group.wire.waits.all(
            self.receiving.pop(segment),
            lambda: f"segment {segment} of a broadcast over {group.size} ranks from {group.name(self.parent)}",
        )
        return landing[: self.codec.used_bytes(landing, self.part(segment).numel())]

    def send(self, segment: int, data: torch.Tensor, peers: list[int]) -> None:
        for peer in peers:
            requests = self.group.wire.send(self.group.comm, data, peer, 0, self.part(segment).nbytes)
            self.slots.hold(segment, requests)

    def _landing(self, segment: int) -> torch.Tensor:
        part = self.part(segment)
        if self.raw:
            return part.view(torch.uint8)  # straight to its place
        return self.slots.take(segment, 0, self.codec.encoded_bytes(part.numel()))
