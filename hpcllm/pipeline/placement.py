"""Which rank of a pipeline holds which part of the model: ranks x chunks virtual stages, in the order of the layers.

    loop, 3 ranks, 2 chunks           v, 3 ranks, 2 chunks
    rank 0    stage 0   stage 3       rank 0    stage 0   stage 5      embedding and head on one rank
    rank 1    stage 1   stage 4       rank 1    stage 1   stage 4
    rank 2    stage 2   stage 5       rank 2    stage 2   stage 3      no message from stage 2 to 3

With one chunk both are the plain pipeline. Sources: loop arXiv:2104.04473 section 2.2; v arXiv:2405.15362 section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlacementKind = Literal["loop", "v"]


@dataclass(frozen=True)
class Placement:
    ranks: int
    chunks: int = 1
    kind: PlacementKind = "loop"

    @property
    def stages(self) -> int:
        """Virtual stages: what the layers are divided over."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is a rank's chunk."""
        turned = self.kind == "v" and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if turned else rank)

    def home(self, stage: int) -> tuple[int, int]:
        """The rank and chunk of a virtual stage: the inverse of `stage`."""
        chunk, place = divmod(stage, self.ranks)
        turned = self.kind == "v" and chunk % 2 == 1
        return (self.ranks - 1 - place if turned else place), chunk
