"""Blocks make up a dataset, each is one stretch of its bytes, and a slab touches those that it shares elements with."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hpcllm.checkpoint import layout
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import Slab, intersection, runs, uncovered

shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
sizes = st.sampled_from([4, 24, 100, 1 << 12, 1 << 22])


@given(shapes, st.sampled_from([1, 2, 4, 8]), sizes)
def test_blocks_tile_a_dataset_in_the_order_of_its_bytes(shape, item_bytes, size):
    with limit(max(size, item_bytes)):
        spec = DatasetSpec(shape, f"uint{8 * item_bytes}")
        tiles = [spec.block("w", k) for k in range(spec.blocks)]
        assert uncovered(shape, tiles) is None
        end = 0
        for tile in tiles:
            assert list(runs(tile, shape, item_bytes)) == [(end, tile.elements * item_bytes)]
            assert spec.block_offset(tile) == end
            assert tile.elements * item_bytes <= layout.BLOCK_BYTES
            end += tile.elements * item_bytes
        assert end == item_bytes * math.prod(shape)


@given(st.data(), shapes, sizes)
def test_a_slab_touches_the_blocks_that_it_overlaps(data, shape, size):
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    slab = Slab("w", start, tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))
    with limit(size):
        spec = DatasetSpec(shape, "float32")
        tiles = [spec.block("w", k) for k in range(spec.blocks)]
        assert list(spec.touching(slab)) == [k for k, tile in enumerate(tiles) if intersection(tile, slab).elements]


def test_blocks_of_common_shapes_are_whole_pages():
    for rows, columns, item_bytes in itertools.product((50257, 4096), (768, 1024, 12288), (2, 4)):
        assert DatasetSpec((rows, columns), f"uint{8 * item_bytes}").chunk_bytes % 4096 == 0


class limit:  # noqa: N801 -- a context
    def __init__(self, size: int) -> None:
        self.size, self.before = size, layout.BLOCK_BYTES

    def __enter__(self) -> None:
        layout.BLOCK_BYTES = self.size

    def __exit__(self, *_: object) -> None:
        layout.BLOCK_BYTES = self.before
