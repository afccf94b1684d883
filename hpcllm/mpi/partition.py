"""Partition of an array: which rank owns which part, and how parts are cut for the wire. Pure: no torch, no MPI.

n = 10 values, 4 ranks     [0 1][2 3 4][5 6][7 8 9]      chunk r belongs to rank r
a chunk, segments of 2     [2 3][4]                      cut from the chunk's start, at multiples of a codec's block
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence


def chunk_range(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return first value and end of the chunk that `rank` owns of n values; lengths differ by one at most."""
    return n * rank // ranks, n * (rank + 1) // ranks


def piece_range(n: int, pieces: int, block: int, piece: int) -> tuple[int, int]:
    """Return first value and end of one of `pieces` parts of n values that all start at multiples of `block`."""
    blocks = -(-n // block)
    start, end = chunk_range(blocks, pieces, piece)
    return min(start * block, n), min(end * block, n)


def whole_blocks(length: int, block: int) -> int:
    """Return the multiple of block nearest below `length`, at least one block."""
    return max(1, length // block) * block


def segment_range(start: int, end: int, length: int, segment: int) -> tuple[int, int]:
    """Return first value and end of one segment of [start, end), cut every `length` values; empty past the end."""
    first = min(start + segment * length, end)
    return first, min(first + length, end)


def share(sizes: Sequence[int], rank: int, ranks: int) -> range:
    """Share of a rank in some pieces of work, laid end to end: those whose middle lies in its equal part.

    No rank gets more than the mean plus the largest piece.
    """
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    middles = [ranks * (2 * end - size) for end, size in zip(ends, sizes, strict=True)]  # scaled to whole numbers
    first, end = (bisect.bisect_left(middles, 2 * total * at) for at in (rank, rank + 1))
    return range(first, len(sizes) if rank == ranks - 1 else end)
