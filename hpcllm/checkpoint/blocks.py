"""The blocks of a dataset: what is written, read and checksummed as one. Pure: no torch, MPI or HDF5.

    (10, 6) of 4 bytes, blocks of at most 96 bytes      block 0   rows 0-3      bytes   0 ..  96 of the dataset
                                                        block 1   rows 4-7      bytes  96 .. 192
                                                        block 2   rows 8-9      bytes 192 .. 240

A block is a box and, whatever the tensor's shape, one stretch of the file: whole rows, or a part of a row where a row
is larger than a block. Who wrote a file does not show in its blocks, so any layout can check what any other wrote.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hpcllm.checkpoint.slabs import Slab

BLOCK_BYTES = 1 << 22  # keeps a file system busy, and costs a reader of a few rows little
_PAGE_BYTES = 4096

Shape = tuple[int, ...]


def block_shape(shape: Shape, item_bytes: int) -> Shape:
    """(1, .., 1, n, full ..): the shape of every block but the last ones along the axis that is cut.

    As many bytes as fit into BLOCK_BYTES, and whole pages of the file where whole rows can make them.
    """
    if not shape:
        return ()
    axis = next(axis for axis in range(len(shape)) if item_bytes * math.prod(shape[axis + 1 :]) <= BLOCK_BYTES)
    row_bytes = item_bytes * math.prod(shape[axis + 1 :])
    rows = BLOCK_BYTES // row_bytes
    if rows < shape[axis]:
        page_rows = _PAGE_BYTES // math.gcd(_PAGE_BYTES, row_bytes)
        rows -= rows % page_rows if rows >= page_rows else 0
    return (*(1 for _ in shape[:axis]), min(rows, shape[axis]), *shape[axis + 1 :])


def block_count(shape: Shape, item_bytes: int) -> int:
    """How many blocks a dataset has."""
    return math.prod(_grid(shape, block_shape(shape, item_bytes)))


def block(dataset: str, shape: Shape, item_bytes: int, index: int) -> Slab:
    """Block `index` of a dataset, 0 <= index < block_count; blocks are numbered in the order of their bytes."""
    size = block_shape(shape, item_bytes)
    place = []
    for cells in reversed(_grid(shape, size)):
        index, at = divmod(index, cells)
        place.append(at)
    start = tuple(at * n for at, n in zip(reversed(place), size, strict=True))
    return Slab(dataset, start, tuple(min(n, g - s) for n, g, s in zip(size, shape, start, strict=True)))


def first_element(slab: Slab, shape: Shape) -> int:
    """Where a block begins in its dataset, in elements; it ends at first_element + slab.elements."""
    place = 0
    for s, n in zip(slab.start, shape, strict=True):
        place = place * n + s
    return place


def touching(slab: Slab, shape: Shape, item_bytes: int) -> Iterator[int]:
    """The blocks that share an element with a slab of the dataset, ascending."""
    if not slab.elements:
        return
    size = block_shape(shape, item_bytes)
    grid = _grid(shape, size)
    cells = [range(s // n, (s + m - 1) // n + 1) for s, m, n in zip(slab.start, slab.shape, size, strict=True)]
    for place in itertools.product(*cells):
        index = 0
        for at, n in zip(place, grid, strict=True):
            index = index * n + at
        yield index


def _grid(shape: Shape, size: Shape) -> Shape:
    return tuple(-(-g // n) for g, n in zip(shape, size, strict=True))
