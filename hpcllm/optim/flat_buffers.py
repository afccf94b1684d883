"""Parameters that lie together in one flat buffer: their gradients are summed, and their weights gathered, at once.

    parameters in forward order    e0  w1  n1  w2  n2  w3      e, n: always exact (embeddings, norms, biases)
    coded buffers, last one first      [   1   ][   0   ]      w:    by the codecs of gradients and parameters
    exact buffers                  [  2  : e0 n1 n2 ]          numbers: the order in which backward completes them

    dp = 3 replicas share buffer 0   [ w3 . . | . . . | . w2 ]  each owns one range, cut anywhere

Parameters that are treated differently never share a buffer: exact or coded, split over tp or whole on each of its
ranks, summed over tp, shared with the other end of the pipeline; with ZeRO-3 also those of different units.

A checkpoint sees one rank's part of a run's state as pieces, ranges of parameters:

    buffer, dp = 2    [ w w w w w w | w w b b n n ]       rank 0 owns the left half, rank 1 the right one
                        Piece(w, 0, 6)  Piece(w, 6, 8) Piece(b, 0, 2) Piece(n, 0, 2)

Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MODEL, MASTER, EXP_AVG, EXP_AVG_SQ = "model", "optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq"


@dataclass(frozen=True)
class Traits:
    """Properties that all parameters of one buffer have in common."""

    exact: bool  # never sent through a lossy codec
    whole: bool = True  # on every tp rank; else each has its part
    tp_partial: bool = False  # each tp rank has an addend of the gradient, so that it is summed over tp
    shared: bool = False  # the tied embedding, of which the other end of the pipeline has a copy
    unit: str = ""  # unit whose weights are gathered and freed together (ZeRO-3); "": they stay


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters that lie one after another in one array, in backward order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements, as this rank has them
    traits: Traits

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def ranges(self, start: int, end: int) -> Iterator[Range]:
        """Ranges of parameters that lie in values [start, end) of the buffer."""
        place = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            first, last = max(start, place), min(end, place + size)
            if first < last:
                yield Range(name, first - place, last - place, first)
            place += size


@dataclass(frozen=True)
class Range:
    """Elements start .. end of a parameter, which begin at value `place` of a flat buffer.

    Elements are counted in the parameter as this rank has it, its tp shard, in row-major order.
    """

    name: str
    start: int
    end: int
    place: int


@dataclass(frozen=True)
class Piece:
    """Memory of elements start .. end of a parameter, or of its optimizer state, that a checkpoint writes and reads."""

    kind: str  # MODEL, MASTER, EXP_AVG or EXP_AVG_SQ
    name: str  # of the parameter
    start: int
    end: int
    values: Tensor  # (end - start,): the memory itself


def lay_out(sizes: Mapping[str, int], traits: Callable[[str], Traits], buffer_values: float) -> list[FlatBuffer]:
    """Buffers of about so many values, in the order in which the backward pass completes them; the shared one last.

    sizes: name -> elements, in forward order. A buffer ends with the parameter that reaches buffer_values. The first
    and the last of a kind have about a quarter of that: then the first sum begins early, and the last one, beside which
    nothing is computed, is short. Not those of a unit (ZeRO-3), which are summed and gathered at once.
    """
    kinds: dict[Traits, dict[str, int]] = {}
    place = {name: number for number, name in enumerate(reversed(list(sizes)))}
    for name in place:
        kinds.setdefault(traits(name), {})[name] = sizes[name]
    buffers = [buffer for kind, names in kinds.items() for buffer in _cut(kind, names, buffer_values)]
    return sorted(buffers, key=lambda buffer: (buffer.traits.shared, place[buffer.names[-1]]))


def _cut(traits: Traits, sizes: Mapping[str, int], buffer_values: float) -> list[FlatBuffer]:
    groups: list[list[str]] = []
    filled, left, short = 0, sum(sizes.values()), buffer_values if traits.unit else buffer_values / 4
    for name, size in sizes.items():
        is_full = filled >= (short if len(groups) == 1 else buffer_values)
        if not groups or is_full or (filled >= short and left <= short):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
        left -= size
    return [FlatBuffer(tuple(names), tuple(sizes[name] for name in names), traits) for names in groups]
