"""Ranges of a rank's flat memory <-> slabs of global tensors. No MPI here.

optimizer    flat buckets over many parameters, cut anywhere between dp replicas: ranges of a parameter
tp           the parameter itself is rows or columns of the global tensor

range 3..13 of this rank's (4, 4)  --boxes-->  three boxes  --shifted by where its shard starts-->  three slabs
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from hpcllm.checkpoint.slabs import Slab, boxes
from hpcllm.model.shards import shard_of, split_dim
from hpcllm.optim.pieces import Piece

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """Which part of the model's parameters a rank of tp has."""

    shapes: Mapping[str, Shape]  # global, of the whole model
    rank: int = 0  # in tp
    size: int = 1

    def slabs(self, piece: Piece) -> Iterator[tuple[Slab, Tensor]]:
        """What the piece is of the global tensor <kind>/<name>, and the memory of each slab in the slab's shape."""
        start, shape = shard_of(piece.name, self.shapes[piece.name], self.rank, self.size)
        done = 0
        for first, size in boxes(shape, piece.start, piece.end):
            count = math.prod(size)
            place = tuple(s + f for s, f in zip(start, first, strict=True))
            yield Slab(f"{piece.kind}/{piece.name}", place, size), piece.values[done : done + count].view(size)
            done += count

    def writes(self, name: str) -> bool:
        """Whether this rank of tp answers for its part of a parameter; of what tp replicates, the first one does."""
        return self.rank == 0 or split_dim(name) is not None
