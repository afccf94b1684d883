"""`grid`: sums along rows of ranks, then along columns, and back the same way: about 4 sqrt(n) messages, not 2 n.

    9 ranks, a strip in 3 parts, one a column; + summed over a row, ++ over all ranks
               1 row addends      2 column addends      3 column sums          4 row copies
    0  1  2    p0+ | p1+ | p2+    each column takes     its owners send        each rank sends its column's part
    3  4  5    p0+ | p1+ | p2+    two steps over its    p0++ | p1++ | p2++     to its row, in the bytes in which it
    6  7  8    p0+ | p1+ | p2+    own part              down and up            came: p0++ p1++ p2++ everywhere

Bytes sent by a rank: 2 (n - 1) / n of x through the codec, as in two_step; messages: 2 (rows + columns - 2) a strip,
28 of 64 ranks in place of 126, 124 of 1024 in place of 2046. The grid is that of strips.py, for any number of ranks.

Error: a value is encoded three times at most, its addend, its row's sum and the whole sum:
    bound(addend) over all ranks  +  bound(row's sum) over all rows  +  bound(sum)
A 16-bit x is rounded once more than in two_step, at the row's sum. Sums run in the order of ranks in a row, then of
rows.

In one turn a leg (legs.py) of each of several strips is started or ended, LAG turns apart:

    turn             k          k - LAG           k - 2 LAG          k - 3 LAG         k - 4 LAG
                     addends    row's sum,        whole sum,         sums come,        decode
                     to row     addends to col.   encoded, to col.   bytes to row

Same bits everywhere: the owner of a sum encodes it once, and all, it too, decode those bytes.
Source of rows and columns: Jain and Sabharwal 2010, "Optimal bucket algorithms for large MPI collectives on torus
interconnects"; of one coding for each stage: Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.legs import LAG, Addends, Copies, Sums, Team, Work
from hpcllm.collectives.strips import Grid, Split, grid_strip_values, split_strips

DEPTH = 4 * LAG  # turns from the first addends of a strip to its last copy


def grid_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    for _ in grid_turns(x, group, codec):
        pass


def grid_turns(x: torch.Tensor, group: Group, codec: Codec, length: int = 0) -> Iterator[None]:
    """Sum x (n,) over the group in place, turn by turn, until exhausted: turn t reads strip t and ends strip t - DEPTH.

    length: of strips; 0: strip_values. Collective over group. Raises StallError, CodecError.
    """
    grid = Grid(group.size)
    row = _row(x, group, codec, grid, length or grid_strip_values(x.numel(), group.size, codec.block, x.is_cpu))
    if group.size == 1 or not row.strips:
        return
    column = cache(lambda place: _column(row, grid, place))  # made when asked for: a call takes no time for each rank
    addends, column_addends = Addends(row), Addends(column(row.team.place))
    sums = Sums(column(row.team.place))
    copies = Copies(row, column, sums)
    for turn in range(row.strips + DEPTH):
        addends.send(turn)
        if 0 <= turn - LAG < row.strips:
            _sum_row(row, turn - LAG, addends)
            column_addends.send(turn - LAG)
        if 0 <= turn - 2 * LAG < row.strips:
            sums.send(turn - 2 * LAG, column_addends)
        if 0 <= turn - 3 * LAG < row.strips:
            addends.sent.wait(turn - 3 * LAG)  # long gone, but raw sums will arrive where these addends are
            sums.arrive(turn - 3 * LAG)
            copies.send(turn - 3 * LAG)
            sums.decode(turn - 3 * LAG)
        copies.decode(turn - DEPTH)
        yield
    for slots in (addends.sent, column_addends.sent, sums.slots):
        slots.wait_all()


def _sum_row(row: Work, strip: int, addends: Addends) -> None:
    """My part of a strip becomes the sum over my row."""
    own = row.own(strip)
    total = addends.add_up(strip, own)
    if total.data_ptr() != own.data_ptr():
        own.copy_(total)


def _row(x: torch.Tensor, group: Group, codec: Codec, grid: Grid, length: int) -> Work:
    """The work of this rank's row on strips of x."""
    first, end = grid.row(grid.row_of(group.rank))
    what = f"a grid sum over {group.size} ranks, along a row"
    team = Team("row", group, end - first, group.rank - first, lambda place: first + place, what)
    split = split_strips(x.numel(), length, grid.columns, codec.block)
    return Work.on_split(x, codec, team, split, -(-x.numel() // length), length)


def _column(row: Work, grid: Grid, place: int) -> Work:
    """The work of the column at one place of my row on that place's parts; behind the columns there is none to do."""
    group, rows = row.team.group, grid.rows
    what = f"a grid sum over {group.size} ranks, along a column"
    team = Team("column", group, rows, grid.row_of(group.rank), lambda number: grid.row(number)[0] + place, what)
    split = Split(lambda strip: row.parts.part(strip, place), rows, row.codec.block)
    return Work.on_split(row.x, row.codec, team, split, row.strips, row.longest)
