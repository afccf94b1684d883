"""Slabs: parts of a global tensor, and where their bytes lie in a file. Pure arithmetic: no torch, MPI or HDF5.

A slab is a box cut out of a global tensor; a dataset is stored row after row, so a slab is a list of runs of bytes:

    columns   0 1 2 3 4 5
    row 0     . . # # . .      Slab("w", start=(0, 2), shape=(3, 2)): one run a row
    row 1     . . # # . .
    row 2     . . # # . .
    row 3     = = = = = =      Slab("w", start=(3, 0), shape=(2, 6)): whole rows, one run
    row 4     = = = = = =

Names carry no rank. A checkpoint written under one split is read under any other: both are slabs of one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # (first, one past) on each dim


@dataclass(frozen=True)
class Slab:
    """The box `start` .. `start + shape` of a dataset, in elements. A scalar has start = shape = ()."""

    dataset: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def whole(dataset: str, shape: tuple[int, ...]) -> Slab:
    """Make the slab that is all of a dataset."""
    return Slab(dataset, (0,) * len(shape), shape)


def fits(slab: Slab, global_shape: tuple[int, ...]) -> bool:
    """True if the slab has the dims of the dataset and lies inside it."""
    if not len(slab.start) == len(slab.shape) == len(global_shape):
        return False
    return all(min(s, n) >= 0 and s + n <= g for s, n, g in zip(slab.start, slab.shape, global_shape, strict=True))


def runs(slab: Slab, global_shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges (offset, length) of the slab within its row-major dataset, ascending, as long as can be.

    Laid end to end they are the slab's own elements in C order, so a buffer of the slab is written run by run.
    """
    if slab.elements == 0:
        return
    dim = max(len(global_shape) - 1, 0)  # the first one along which a whole stretch is one run
    while dim > 0 and slab.shape[dim] == global_shape[dim]:
        dim -= 1
    rest = slab.start[dim:]
    for index in itertools.product(*(range(s, s + n) for s, n in zip(slab.start, slab.shape[:dim], strict=False))):
        yield item_bytes * place_of((*index, *rest), global_shape), item_bytes * math.prod(slab.shape[dim:])


def part_of(inner: Slab, outer: Slab) -> tuple[slice, ...] | None:
    """Index of `inner` in an array of `outer`'s shape; None if not wholly inside. Both of one dataset."""
    begins = [i - o for i, o in zip(inner.start, outer.start, strict=True)]
    ends = [begin + n for begin, n in zip(begins, inner.shape, strict=True)]
    if any(begin < 0 for begin in begins) or any(e > n for e, n in zip(ends, outer.shape, strict=True)):
        return None
    return tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))


def intersection(one: Slab, other: Slab) -> Slab:
    """The slab of elements that two slabs of one dataset share; empty if there are none."""
    start = tuple(max(s, t) for s, t in zip(one.start, other.start, strict=True))
    ends = (min(s + n, t + m) for s, n, t, m in zip(one.start, one.shape, other.start, other.shape, strict=True))
    return Slab(one.dataset, start, tuple(max(end - s, 0) for s, end in zip(start, ends, strict=True)))


def place_of(index: Iterable[int], shape: Iterable[int]) -> int:
    """Number of an element of a tensor in C order."""
    place = 0
    for at, n in zip(index, shape, strict=True):
        place = place * n + at
    return place


def stretch(inner: Slab, outer: Slab) -> int | None:
    """First element of `inner`, inside `outer`, in outer's C order; None if other elements lie between its own.

    Then it is elements stretch .. stretch + inner.elements of an array of outer's shape.
    """
    dims = [dim for dim, (n, m) in enumerate(zip(inner.shape, outer.shape, strict=True)) if n != m]
    if dims and any(n != 1 for n in inner.shape[: dims[-1]]):
        return None
    return place_of((s - t for s, t in zip(inner.start, outer.start, strict=True)), outer.shape)


def uncovered(global_shape: tuple[int, ...], slabs: Iterable[Slab]) -> str | None:
    """Name the first element in C order that is not held exactly once, and how often it is; None if all are.

    Slabs must fit (see `fits`); those without elements hold nothing.

    Sweeps the first dim: between two neighbouring edges the set of slabs does not change, and what they leave of
    the other dims is the same question with one dim less.
    """
    boxes = [tuple((s, s + n) for s, n in zip(slab.start, slab.shape, strict=True)) for slab in slabs if slab.elements]
    fault = _first_fault(global_shape, boxes)
    return None if fault is None else f"element {fault[0]} is held {fault[1]} times"


def boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and shape of the boxes that elements first..end (in C order) of a tensor make up, in that order.

    At most 2 x dims - 1 of them: the rest of a row that was begun, whole rows, a row that is not finished.

        . . . #        elements 3..13 of (4, 4): (0, 3) + (1, 1), (1, 0) + (2, 4), (3, 0) + (1, 1)
        # # # #
        # # # #
        # . . .
    """
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    row_elements = math.prod(shape[1:])
    (row, begun), (last_row, left) = divmod(first, row_elements), divmod(end, row_elements)
    if row == last_row:
        yield from _in_row(row, shape, begun, left)
        return
    if begun:
        yield from _in_row(row, shape, begun, row_elements)
        row += 1
    if row < last_row:
        yield (row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:])
    yield from _in_row(last_row, shape, 0, left)


def _in_row(
    row: int, shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, size in boxes(shape[1:], first, end):
        yield (row, *start), (1, *size)


def _first_fault(shape: tuple[int, ...], boxes: list[Box]) -> tuple[tuple[int, ...], int] | None:
    if not shape:
        return None if len(boxes) == 1 else ((), len(boxes))
    waiting = deque(sorted(boxes))
    active: list[Box] = []
    edges = sorted({0, shape[0], *itertools.chain.from_iterable(box[0] for box in boxes)})
    for low in edges[:-1]:
        active = [box for box in active if box[0][1] > low]
        while waiting and waiting[0][0][0] == low:
            active.append(waiting.popleft())
        fault = _first_fault(shape[1:], [box[1:] for box in active])
        if fault:
            return (low, *fault[0]), fault[1]
    return None
