"""Boxes of theirs are exactly the elements of the box of ours, for every way in which a tensor is stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcllm.checkpoint.huggingface.tensor_map import MappedTensor
from hpcllm.checkpoint.slabs import Slab, uncovered

HEADS, CHANNELS, INPUTS = 3, 4, 5
ROWS = HEADS * CHANNELS
ALONE = [MappedTensor("t"), MappedTensor("t", transposed=True)]
FUSED = [[MappedTensor("t", transposed=turn, part=part, parts=3, groups=groups) for part in range(3)]
         for turn, groups in itertools.product((False, True), (1, HEADS))]  # fmt: skip


def fuse(parts: list[np.ndarray], place: MappedTensor) -> np.ndarray:
    """Theirs of all parts, by the definition: groups, parts, rows."""
    rows = [part.reshape(place.groups, 1, -1, *part.shape[1:]) for part in parts]
    fused = np.concatenate(rows, axis=1).reshape(-1, *parts[0].shape[1:])
    return fused.T if place.transposed else fused


@pytest.mark.parametrize("shape", [(ROWS, INPUTS), (ROWS,)])
@pytest.mark.parametrize("places", [*([place] for place in ALONE), *FUSED])
def test_every_box_of_ours_is_read_where_it_lies(places, shape):
    parts = [np.arange(np.prod(shape)).reshape(shape) + 1000 * number for number in range(len(places))]
    for place, ours in zip(places, parts, strict=True):
        theirs = fuse(parts, place)
        assert place.shape(shape) == theirs.shape
        for first, count in itertools.product(range(ROWS), range(ROWS + 1)):
            if first + count <= ROWS:
                columns = [(0, INPUTS), (1, 3)] if len(shape) == 2 else [None]
                for column in columns:
                    check(place, theirs, ours, first, count, column)


def check(place, theirs, ours, first, count, column) -> None:
    start, size = ((first,), (count,)) if column is None else ((first, column[0]), (count, column[1] - column[0]))
    index = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
    got = np.full(size, -1)
    for box, rows in place.boxes(Slab("ours", start, size), ours.shape):
        part = theirs[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]
        assert part.shape == box.shape  # inside the tensor
        got[rows] = part.T if place.transposed else part
    np.testing.assert_array_equal(got, ours[index])


@pytest.mark.parametrize("places", [*([place] for place in ALONE), *FUSED])
def test_the_parts_of_a_tensor_fill_it(places):
    boxes = [box for place in places for box, _ in place.boxes(Slab("ours", (0, 0), (ROWS, INPUTS)), (ROWS, INPUTS))]
    assert uncovered(places[0].shape((ROWS, INPUTS)), boxes) is None
