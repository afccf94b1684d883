"""Blocks make up a dataset, each is one stretch of its bytes, and a slab touches those that it shares elements with."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hpcllm.checkpoint import blocks
from hpcllm.checkpoint.blocks import block, block_count, block_shape, first_element, touching
from hpcllm.checkpoint.slabs import Slab, overlap, runs, uncovered

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
sizes = st.sampled_from([4, 24, 100, 1 << 12, 1 << 22])


@given(shapes, st.sampled_from([1, 2, 4, 8]), sizes)
def test_blocks_tile_a_dataset_in_the_order_of_its_bytes(shape, item_bytes, size):
    with limit(max(size, item_bytes)):
        tiles = [block("w", shape, item_bytes, k) for k in range(block_count(shape, item_bytes))]
        assert uncovered(shape, tiles) is None
        end = 0
        for tile in tiles:
            assert list(runs(tile, shape, item_bytes)) == [(end, tile.elements * item_bytes)]
            assert first_element(tile, shape) * item_bytes == end
            assert tile.elements * item_bytes <= blocks.BLOCK_BYTES
            end += tile.elements * item_bytes
        assert end == item_bytes * math.prod(shape)


@given(st.data(), shapes, sizes)
def test_a_slab_touches_the_blocks_that_it_overlaps(data, shape, size):
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    slab = Slab("w", start, tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))
    with limit(size):
        tiles = [block("w", shape, 4, k) for k in range(block_count(shape, 4))]
        assert list(touching(slab, shape, 4)) == [k for k, tile in enumerate(tiles) if overlap(tile, slab)]


def test_blocks_of_common_shapes_are_whole_pages():
    for rows, columns, item_bytes in itertools.product((50257, 4096), (768, 1024, 12288), (2, 4)):
        shape = block_shape((rows, columns), item_bytes)
        assert math.prod(shape) * item_bytes % 4096 == 0


class limit:  # noqa: N801 -- a context
    def __init__(self, size: int) -> None:
        self.size, self.before = size, blocks.BLOCK_BYTES

    def __enter__(self) -> None:
        blocks.BLOCK_BYTES = self.size

    def __exit__(self, *_: object) -> None:
        blocks.BLOCK_BYTES = self.before
