"""Cuts of an array for sums through owners: strips, parts of a strip, rows and columns of ranks. Pure arithmetic.

    x (n,)     [ strip 0       | strip 1       | strip 2   ]    strips are on their way at the same time, like a stream
    strip 0    [ part | part | part | part ]                    a part has one owner, who adds it up
    strip 1    [ part | part | part | part ]

Strips have a length of their own, so that scratch memory has a bound whatever the length of x and the number of ranks.
A part has LEAST_VALUES at least: a strip that is shorter than one such part for each rank has fewer owners, and the
next strip has the ranks after them. All bounds are multiples of the codec's block.

Ranks in a grid, here 11 of them. Column c owns the same part of a strip in every row; rank 5 and rank 10 own none:

    row 0    0   1   2               rows = floor(sqrt(ranks)); row r has the ranks chunk_range(ranks, rows, r)
    row 1    3   4   5  (6)          columns = ranks // rows: the length of the shortest row
    row 2    7   8   9  (10)

Any number of ranks has a grid, primes too, and no rank is idle: those in brackets bring addends and get sums. Whatever
is asked about a rank or a part is answered at once, without a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcllm.mpi.partition import chunk_range, piece_range, segment_range, whole_blocks

SEGMENT_VALUES = 1 << 17  # a part: long enough for a wire, short enough for a cache and for the ends of the pipeline
DEVICE_SEGMENT_VALUES = 1 << 21  # 8 MiB of fp32: 20 us of Python for each, beside 300 us on a wire of 25 GB/s
TURN_VALUES = 1 << 22  # a strip at most, which bounds the scratch memory
# whole segments for the 8 devices of a node, and four buckets of gradients (communication.bucket_mib), each one strip.
# With more owners parts are shorter: a longer turn would not change that for buckets, and take more than the 64 MiB,
# raw, of each of the 2 * LAG + 4 turns that have scratch memory at once
DEVICE_TURN_VALUES = 1 << 24
LEAST_VALUES = 1 << 12  # a part: 4 KiB as int8, which a fast link takes as long for as a core to start a message
PIECE_VALUES = 32  # whole cache lines of any dtype: two ranks never write one
STREAMED = 8  # strips: an eighth of the work inside a node stands alone, and its ranks meet for each of them
STREAM_VALUES = 1 << 15  # of a strip to each peer: a wire of 1 Gbit/s takes 1 ms for it, ranks 0.1 ms for a turn
GRID_RANKS = 64  # from here a grid's fewer messages are worth its one more coding: 28 a strip instead of 126


def strip_values(n: int, owners: int, block: int, on_cpu: bool = True) -> int:
    """Return the length of the strips of n values, a multiple of block."""
    part, turn = most_values(on_cpu)
    whole = -(-n // block) * block
    return max(block, min(whole, whole_blocks(min(part * owners, turn), block)))


def most_values(on_cpu: bool) -> tuple[int, int]:
    """Return the most values of a part and of a strip."""
    return (SEGMENT_VALUES, TURN_VALUES) if on_cpu else (DEVICE_SEGMENT_VALUES, DEVICE_TURN_VALUES)


def lane_pieces(n: int, nodes: int, block: int, capacity: int) -> tuple[int, int]:
    """Return values in a piece of a lane's n, at most capacity, and pieces in a strip that goes to other nodes.

    Strips are short enough that STREAMED of them follow one another, but no shorter than a message should be.
    """
    unit = max(block, PIECE_VALUES)
    piece = whole_blocks(capacity, unit) if capacity >= unit else capacity
    owners = Grid(nodes).columns if takes_grid(nodes) else nodes
    wanted = min(TURN_VALUES, max(n // STREAMED, STREAM_VALUES * owners))
    return piece, max(1, wanted // piece)


@dataclass(frozen=True)
class Split:
    """Parts of strips. range_of(strip): first value and end of what is cut. owners: places that may own a part."""

    range_of: Callable[[int], tuple[int, int]]
    owners: int
    block: int

    def part(self, strip: int, place: int) -> tuple[int, int]:
        """Return first value and end of the part that this place owns; empty if it owns none."""
        first, end = self.range_of(strip)
        parts, number = self.parts_of(end - first), self.number(strip, place)
        if place >= self.owners or number >= parts:
            return end, end
        start, stop = piece_range(end - first, parts, self.block, number)
        return first + start, first + stop

    def number(self, strip: int, place: int) -> int:
        """Return the number of the part that this place owns, in the order of values."""
        first, end = self.range_of(strip)
        return (place - strip * self.parts_of(end - first)) % self.owners

    def places(self, strip: int, after: int) -> Iterator[int]:
        """Yield the places of all owners, at first those behind `after`; with -1 in the order of their parts."""
        first, end = self.range_of(strip)
        parts = self.parts_of(end - first) if end > first else 0
        start = self.number(strip, (after + 1) % self.owners) if after >= 0 else 0
        start = start if start < parts else 0
        for number in range(start, start + parts):
            yield (number % parts + strip * parts) % self.owners

    def longest(self, values: int) -> int:
        """Return the most values that a part can have where strips have `values` at most."""
        even = -(-values // self.block // self.owners) * self.block
        return min(-(-values // self.block) * self.block, max(self._least(), even))

    def parts_of(self, values: int) -> int:
        """Return the number of parts of a strip of so many values."""
        return max(1, min(self.owners, -(-values // self._least())))

    def _least(self) -> int:
        return whole_blocks(min(LEAST_VALUES, TURN_VALUES // self.owners), self.block)


def split_strips(n: int, length: int, owners: int, block: int) -> Split:
    """Parts of the strips of n values, `length` each."""
    return Split(lambda strip: segment_range(0, n, length, strip), owners, block)


@dataclass(frozen=True)
class Grid:
    """Rows and columns of ranks, see the head of the file."""

    ranks: int

    @property
    def rows(self) -> int:
        return math.isqrt(self.ranks)

    @property
    def columns(self) -> int:
        return self.ranks // self.rows

    def row_of(self, rank: int) -> int:
        return ((rank + 1) * self.rows - 1) // self.ranks

    def row(self, number: int) -> tuple[int, int]:
        """Return the first rank of a row and the one behind its last."""
        return chunk_range(self.ranks, self.rows, number)

    def messages(self) -> int:
        """Return the most messages that a rank sends for a strip: 2 to all others of its row and of its column."""
        longest_row = -(-self.ranks // self.rows)
        return 2 * (longest_row - 1) + 2 * (self.rows - 1)


def grid_strip_values(n: int, ranks: int, block: int, on_cpu: bool = True) -> int:
    """Return the length of the strips of n values in a grid: parts of rows are twice as long, for messages are few."""
    return strip_values(n, 2 * Grid(ranks).columns, block, on_cpu)


def takes_grid(ranks: int) -> bool:
    """True if a sum of so many addends goes through rows and columns where nothing was measured."""
    return ranks >= GRID_RANKS
