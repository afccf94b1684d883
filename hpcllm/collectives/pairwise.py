"""`pairwise`: an all-to-all in which, at distance d, every rank sends to rank + d and receives from rank - d.

    4 ranks       distance 1     2        3          each block in segments; one is decoded LAG turns after its
    rank 0 sends  to 1           to 2     to 3       like was sent, so that codec and wire work together
    receives      from 3         from 2   from 1

Every block goes straight to its owner: (n - 1) / n of x sent, n - 1 messages a segment.
Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.3.
"""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Slots
from hpcllm.mpi.partition import whole_blocks

LAG = 2
SEGMENT_VALUES = 1 << 18


def pairwise_alltoall(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """Block r of x (n,), n a multiple of the ranks, goes to rank r. Collective over group.

    Raises StallError, CodecError. A rank's block for itself is not encoded.
    """
    block = x.numel() // group.size
    pairs = _Pairs(x.view(group.size, block), out.view(group.size, block), group, codec)
    for turn in range(len(pairs.turns) + LAG):
        if turn < len(pairs.turns):
            pairs.start(turn)
        if turn >= LAG:
            pairs.finish(turn - LAG)
    out.view(group.size, block)[group.rank].copy_(x.view(group.size, block)[group.rank])
    pairs.leaving.wait_all()


class _Pairs:
    """Segments of one call and their slots. x, out: (ranks, block)."""

    def __init__(self, x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
        self.x, self.out, self.group, self.codec = x, out, group, codec
        self.raw = isinstance(codec, Raw)
        block = x.shape[1]
        length = whole_blocks(min(SEGMENT_VALUES, block), codec.block)
        parts = [slice(first, min(first + length, block)) for first in range(0, block, length)]
        self.turns = [(distance, part) for distance in range(1, group.size) for part in parts]
        self.slot_bytes = 0 if self.raw else codec.encoded_bytes(length)
        what = f"blocks of an all-to-all over {group.size} ranks to go"
        self.leaving = Slots(group.wire, "leaving", LAG + 1, 1, self.slot_bytes, what)
        self.landing = Slots(group.wire, "coming", LAG + 1, 1, self.slot_bytes, what)
        self.receiving: dict[int, list[MPI.Request]] = {}

    def start(self, turn: int) -> None:
        (distance, part), group = self.turns[turn], self.group
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        self.receiving[turn] = group.wire.receive(group.comm, self._landing(turn), source, 0)
        self.leaving.wait(turn)
        values = self.x[to, part]
        index = (group.rank * group.size + to) * self.x.shape[1] + part.start
        data = self.codec.encode(values, self.leaving.take(turn, 0, self.slot_bytes), index)
        self.leaving.hold(turn, group.wire.send(group.comm, data, to, 0, values.nbytes))

    def finish(self, turn: int) -> None:
        (distance, part), group = self.turns[turn], self.group
        source = (group.rank - distance) % group.size
        group.wire.waits.all(
            self.receiving.pop(turn),
            lambda: f"a block of an all-to-all over {group.size} ranks from {group.name(source)}",
        )
        landing, values = self._landing(turn), self.out[source, part]
        self.codec.decode(landing[: self.codec.used_bytes(landing, values.numel())], values)

    def _landing(self, turn: int) -> torch.Tensor:
        distance, part = self.turns[turn]
        values = self.out[(self.group.rank - distance) % self.group.size, part]
        if self.raw:
            return values.view(torch.uint8)  # straight to its place
        return self.landing.take(turn, 0, self.codec.encoded_bytes(values.numel()))
