r"""Where a box of our parameter lies in a tensor of theirs. Pure arithmetic on slabs; both directions use it.

    as it is        ours (outputs, inputs)  =  theirs                      Llama
    transposed      ours (outputs, inputs)  =  theirs (inputs, outputs)^T  GPT-2
    a part of one   their outputs are groups x parts x rows, ours is one part of each group:

        GPT-2     1 group            [ q q q q | k k k k | v v v v ]
        GPT-NeoX  a group a head     [ q q | k k | v v ] [ q q | k k | v v ]

A box of ours is a few boxes of theirs, one a group that it touches. So a tensor-parallel rank reads just its rows out
of a fused tensor, and a large tensor is copied in pieces, whichever of the two is read and whichever written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcllm.checkpoint.slabs import Slab

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """The tensor of theirs that holds a parameter of ours, and how."""

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    groups: int = 1

    def shape(self, ours: Shape) -> Shape:
        """Of the whole tensor of theirs, given the shape of our parameter."""
        outputs_first = (ours[0] * self.parts, *ours[1:])
        return outputs_first[::-1] if self.transposed else outputs_first

    def boxes(self, slab: Slab, shape: Shape) -> Iterator[tuple[Slab, slice]]:
        """Boxes of theirs, and which rows of the slab each one is. shape: of our whole parameter."""
        group_rows = shape[0] // self.groups
        row, done = slab.start[0], 0
        while done < slab.shape[0]:
            group, inside = divmod(row + done, group_rows)
            count = min(group_rows - inside, slab.shape[0] - done)
            start = ((group * self.parts + self.part) * group_rows + inside, *slab.start[1:])
            size = (count, *slab.shape[1:])
            theirs = Slab(self.name, start[::-1], size[::-1]) if self.transposed else Slab(self.name, start, size)
            yield theirs, slice(done, done + count)
            done += count
