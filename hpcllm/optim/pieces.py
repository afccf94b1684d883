"""What one rank holds of a run's state, as ranges of parameters: what a checkpoint writes and reads.

    flat array of dp = 2    [ w w w w w w | w w b b n n ]       rank 0 owns the left half, rank 1 the right one
                              Piece(w, 0, 6)  Piece(w, 6, 8) Piece(b, 0, 2) Piece(n, 0, 2)

A range counts the elements of the parameter as this rank has it, its tp shard, in row-major order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

MODEL, MASTER, EXP_AVG, EXP_AVG_SQ = "model", "optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq"


@dataclass(frozen=True)
class Piece:
    kind: str  # MODEL, MASTER, EXP_AVG or EXP_AVG_SQ
    name: str  # of the parameter
    start: int
    end: int
    values: Tensor  # (end - start,): the memory itself


@dataclass(frozen=True)
class Range:
    """Elements start .. end of a parameter, which begin at `place` in a flat array."""

    name: str
    start: int
    end: int
    place: int


def ranges(names: Sequence[str], sizes: Sequence[int], start: int, end: int) -> Iterator[Range]:
    """Which elements of which parameters lie in [start, end) of the flat array that holds one after another."""
    place = 0
    for name, size in zip(names, sizes, strict=True):
        first, last = max(start, place), min(end, place + size)
        if first < last:
            yield Range(name, first - place, last - place, first)
        place += size
