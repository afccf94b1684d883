"""Ranges of a rank's flat memory <-> slabs of global tensors. No MPI here.

optimizer    flat buckets over many parameters, cut anywhere between dp replicas: ranges of a parameter
tp           the parameter itself is rows or columns of the global tensor

range 3..13 of this rank's (4, 4)  --boxes-->  three boxes  --shifted by where its shard starts-->  three slabs
"""

from __future__ import annotations

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

    def places(self, kind: str, name: str, start: int, end: int) -> Iterator[Slab]:
        """What elements start .. end of this rank's part of a parameter are of the global tensor <kind>/<name>."""
        origin, shape = shard_of(name, self.shapes[name], self.rank, self.size)
        for first, size in boxes(shape, start, end):
            yield Slab(f"{kind}/{name}", tuple(o + f for o, f in zip(origin, first, strict=True)), size)

    def slabs(self, piece: Piece) -> Iterator[tuple[Slab, Tensor]]:
        """The same of a piece, and the memory of each slab in the slab's shape."""
        done = 0
        for slab in self.places(piece.kind, piece.name, piece.start, piece.end):
            yield slab, piece.values[done : done + slab.elements].view(slab.shape)
            done += slab.elements

    def writes(self, name: str) -> bool:
        """Whether this rank of tp answers for its part of a parameter; of what tp replicates, the first one does."""
        return self.rank == 0 or split_dim(name) is not None
