"""Cuts of an array for sums through owners: every value has one owner, whatever the ranks, the length and the block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.collectives import strips
from hpcllm.collectives.ring import lane_count
from hpcllm.collectives.strips import Grid, Split, grid_strip_values, lane_pieces, split_strips, strip_values

blocks = st.sampled_from([1, 4, 32, 256, 2048])


@settings(max_examples=60)
@given(n=st.integers(1, 3_000_000), owners=st.integers(1, 200), block=blocks, data=st.data())
def test_parts_cover_a_strip_once_at_multiples_of_the_block(n, owners, block, data):
    length = strip_values(n, owners, block)
    split = split_strips(n, length, owners, block)
    strip = data.draw(st.integers(0, -(-n // length) - 1))
    places = list(split.places(strip, after=-1))
    parts = [split.part(strip, place) for place in places]
    assert len(set(places)) == len(places) <= split.parts_of(length)
    assert parts[0][0] == strip * length
    assert parts[-1][1] == min(n, (strip + 1) * length)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert all(first % block == 0 and end - first <= split.longest(length) for first, end in parts)
    assert [split.number(strip, place) for place in places] == list(range(len(places)))
    idle = set(range(owners + 3)) - set(places)
    assert all(first == end for first, end in (split.part(strip, place) for place in idle))
    after = data.draw(st.integers(0, owners + 3))
    assert set(split.places(strip, after)) == set(places)


@settings(max_examples=60)
@given(n=st.integers(1, 3_000_000), ranks=st.integers(1, 300), block=blocks, data=st.data())
def test_columns_cut_the_parts_of_rows_alike(n, ranks, block, data):
    grid = Grid(ranks)
    length = grid_strip_values(n, ranks, block)
    row = split_strips(n, length, grid.columns, block)
    strip = data.draw(st.integers(0, -(-n // length) - 1))
    ends = []
    for place in row.places(strip, after=-1):
        column = Split(lambda number, place=place: row.part(number, place), grid.rows, block)
        parts = [column.part(strip, owner) for owner in column.places(strip, after=-1)]
        assert all(0 < end - first <= column.longest(row.longest(length)) for first, end in parts)
        assert len(parts) <= column.parts_of(row.longest(length))
        ends += parts
    assert ends[0][0] == strip * length
    assert ends[-1][1] == min(n, (strip + 1) * length)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))


@given(ranks=st.integers(1, 20_000), data=st.data())
def test_a_grid_has_every_rank_in_one_row_and_rows_of_nearly_one_length(ranks, data):
    grid, rank = Grid(ranks), data.draw(st.integers(0, ranks - 1))
    first, end = grid.row(grid.row_of(rank))
    assert first <= rank < end
    assert grid.row(0)[0] == 0
    assert grid.row(grid.rows - 1)[1] == ranks
    assert grid.columns <= end - first <= grid.columns + 1
    assert grid.messages() <= 4 * ranks**0.5 + 2
    if ranks == grid.rows**2:
        assert grid.messages() == 2 * (2 * grid.rows - 2)


@pytest.mark.parametrize("owners", [2, 16, 1024, 8192, 100_000])
@pytest.mark.parametrize("block", [1, 256])
def test_a_turn_has_a_bound_whatever_the_ranks(owners, block):
    """All addends of one part of a strip, and all parts of a strip: what arrives in a turn."""
    length = strip_values(1 << 30, owners, block)
    split = split_strips(1 << 30, length, owners, block)
    assert length <= strips.TURN_VALUES
    assert owners * split.longest(length) <= strips.TURN_VALUES + owners * block


@pytest.mark.parametrize("owners", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("block", [1, 256])
def test_long_arrays_of_a_node_s_devices_travel_in_segments_of_8_to_16_mib(owners, block):
    length = strip_values(1 << 30, owners, block, on_cpu=False)
    assert 8 << 20 <= 4 * split_strips(1 << 30, length, owners, block).longest(length) <= 16 << 20
    for mib in (1, 7, 8, 20, 100, 333):
        lane_bytes = (mib << 20) / lane_count(mib << 20, on_cpu=False)
        assert min(mib, 8) << 20 <= lane_bytes < 16 << 20


@pytest.mark.parametrize("owners", [2, 16, 1024, 8192, 100_000])
def test_a_turn_of_devices_has_a_bound_whatever_the_ranks(owners):
    assert strip_values(1 << 30, owners, 256, on_cpu=False) <= strips.DEVICE_TURN_VALUES


@given(n=st.integers(0, 1 << 28), nodes=st.integers(2, 2000), block=blocks, capacity=st.integers(1, 1 << 17))
def test_a_lanes_strip_is_whole_pieces_that_fit_a_slot(n, nodes, block, capacity):
    piece, pieces = lane_pieces(n, nodes, block, capacity)
    assert 1 <= piece <= capacity
    assert pieces >= 1
    assert piece * pieces <= max(strips.TURN_VALUES, piece)
    assert piece % block == 0 or piece == capacity
