"""Who holds which part of a global tensor, and where those bytes lie in a file. Pure arithmetic: no torch, MPI or HDF5.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # (first, one past) on each axis


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
    """The slab that is all of a dataset."""
    return Slab(dataset, (0,) * len(shape), shape)


def fits(slab: Slab, global_shape: tuple[int, ...]) -> bool:
    """Does the slab have the axes of the dataset, and lie inside it?"""
    if not len(slab.start) == len(slab.shape) == len(global_shape):
        return False
    return all(min(s, n) >= 0 and s + n <= g for s, n, g in zip(slab.start, slab.shape, global_shape, strict=True))


def runs(slab: Slab, global_shape: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    """Byte ranges (offset, length) of the slab within its row-major dataset, ascending, each as long as it can be.

    Laid end to end they are the slab's own elements in C order, so a buffer of the slab is written run by run.
    """
    if slab.elements == 0:
        return
    strides = _strides(global_shape, item_bytes)
    axis = _run_axis(slab, global_shape)
    first = sum(s * stride for s, stride in zip(slab.start, strides, strict=True))
    length = item_bytes * math.prod(slab.shape[axis:])
    for index in itertools.product(*(range(n) for n in slab.shape[:axis])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def part_of(inner: Slab, outer: Slab) -> tuple[slice, ...] | None:
    """Where `inner` lies in an array of `outer`'s shape, or None if not wholly inside. Both of one dataset."""
    begins = [i - o for i, o in zip(inner.start, outer.start, strict=True)]
    ends = [begin + n for begin, n in zip(begins, inner.shape, strict=True)]
    if any(begin < 0 for begin in begins) or any(e > n for e, n in zip(ends, outer.shape, strict=True)):
        return None
    return tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))


def uncovered(global_shape: tuple[int, ...], slabs: Iterable[Slab]) -> str | None:
    """None if the slabs hold every element exactly once; otherwise which element (the first in C order) is held
    how often. Slabs must fit (see `fits`); those without elements hold nothing.

    Sweeps the first axis: between two neighbouring edges the set of slabs does not change, and what they leave of
    the other axes is the same question with one axis less.
    """
    boxes = [tuple((s, s + n) for s, n in zip(slab.start, slab.shape, strict=True)) for slab in slabs if slab.elements]
    fault = _first_fault(global_shape, boxes)
    return None if fault is None else f"element {fault[0]} is held {fault[1]} times"


def assign_writers(bytes_by_dataset: Mapping[str, int], replicas: int) -> dict[str, int]:
    """dataset -> the replica that writes it. All replicas hold the same bytes, so each writes about 1 / replicas.

    Largest first to the one with least (Graham 1969, "Bounds on multiprocessing timing anomalies"): no replica gets
    more than the mean plus the largest dataset. The answer depends on names and sizes alone, not on their order.
    """
    load = [0] * replicas
    writer = {}
    for name, size in sorted(bytes_by_dataset.items(), key=lambda item: (-item[1], item[0])):
        least = load.index(min(load))
        load[least] += size
        writer[name] = least
    return writer


def _strides(shape: tuple[int, ...], item_bytes: int) -> list[int]:
    return [item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _run_axis(slab: Slab, global_shape: tuple[int, ...]) -> int:
    """The first axis of which a whole stretch is one run: every later axis is taken in full."""
    axis = max(len(global_shape) - 1, 0)
    while axis > 0 and slab.shape[axis] == global_shape[axis]:
        axis -= 1
    return axis


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
