"""Slabs: any split of a tensor, written, is the tensor; any other split reads it back."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.checkpoint.slabs import Slab, boxes, fits, intersection, part_of, runs, uncovered, whole
from hpcllm.mpi.partition import share

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(max_examples=150, deadline=None)


@quick
@given(shape=SHAPES, seed=SEEDS, written=st.integers(0, 6), read=st.integers(0, 6), item=st.sampled_from([1, 2, 4, 8]))
def test_written_by_one_split_and_read_by_another(partition, index_of, shape, seed, written, read, item):
    rng = np.random.default_rng(seed)
    tensor = rng.integers(0, 100, shape).astype(f"u{item}")
    file = bytearray(tensor.nbytes)
    for slab in partition(rng, "w", shape, written):
        data, done = tensor[index_of(slab)].tobytes(), 0
        for offset, length in runs(slab, shape, item):
            file[offset : offset + length] = data[done : done + length]
            done += length
        assert done == len(data)
    for slab in partition(rng, "w", shape, read):
        found = b"".join(file[offset : offset + length] for offset, length in runs(slab, shape, item))
        assert found == tensor[index_of(slab)].tobytes()


@quick
@given(shape=SHAPES, seed=SEEDS)
def test_runs_ascend_and_are_as_long_as_they_can_be(partition, shape, seed):
    for slab in partition(np.random.default_rng(seed), "w", shape, 4):
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs(slab, shape, 4)))
    assert list(runs(whole("w", shape), shape, 4)) == [(0, 4 * math.prod(shape))]


@quick
@given(shape=SHAPES, seed=SEEDS, boxes=st.integers(0, 6))
def test_uncovered_agrees_with_counting(index_of, shape, seed, boxes):
    rng = np.random.default_rng(seed)
    ranges = [[sorted(rng.integers(0, n + 1, 2)) for n in shape] for _ in range(boxes)]
    slabs = [Slab("w", tuple(int(a) for a, _ in r), tuple(int(b - a) for a, b in r)) for r in ranges]
    held = np.zeros(shape, dtype=int)
    for slab in slabs:
        held[index_of(slab)] += 1
    wrong = np.argwhere(held != 1)
    first = tuple(int(i) for i in wrong[0]) if len(wrong) else None
    expected = None if first is None else f"element {first} is held {held[first]} times"
    assert uncovered(shape, slabs) == expected


@quick
@given(shape=SHAPES, seed=SEEDS, cuts=st.integers(0, 8))
def test_a_split_covers_until_a_piece_is_lost_or_doubled(partition, shape, seed, cuts):
    slabs = [slab for slab in partition(np.random.default_rng(seed), "w", shape, cuts) if slab.elements]
    assert uncovered(shape, slabs) is None
    for slab in slabs:
        assert "held 2 times" in uncovered(shape, [*slabs, slab])
        assert "held 0 times" in uncovered(shape, [other for other in slabs if other != slab])


def test_cover_of_a_thousand_row_slabs_is_found_at_once():
    rows = [Slab("w", (row, 0), (1, 64)) for row in range(2000)]
    assert uncovered((2000, 64), rows) is None
    assert uncovered((2000, 64), rows[:700] + rows[701:]) == "element (700, 0) is held 0 times"


@quick
@given(shape=SHAPES, seed=SEEDS)
def test_part_of_finds_the_inner_box(partition, index_of, shape, seed):
    rng = np.random.default_rng(seed)
    tensor = rng.random(shape)
    for outer, inner in itertools.product(partition(rng, "w", shape, 3), partition(rng, "w", shape, 5)):
        part = part_of(inner, outer)
        held = np.zeros(shape, dtype=int)
        held[index_of(outer)] = 1
        if inner.elements:
            assert (part is not None) == bool(held[index_of(inner)].all())
        if part is not None:
            np.testing.assert_array_equal(tensor[index_of(outer)][part], tensor[index_of(inner)])


def test_slabs_that_leave_the_dataset_do_not_fit():
    assert fits(Slab("w", (2, 0), (2, 6)), (4, 6))
    for start, shape in [((3, 0), (2, 6)), ((-1, 0), (2, 6)), ((0,), (4,)), ((0, 0), (-1, 6)), ((), ())]:
        assert not fits(Slab("w", start, shape), (4, 6))


@quick
@given(shape=SHAPES, data=st.data())
def test_a_range_is_a_few_boxes_in_its_order(shape, data):
    n = math.prod(shape)
    first = data.draw(st.integers(0, n))
    end = data.draw(st.integers(0, n))
    tensor = np.arange(n).reshape(shape)
    found = list(boxes(shape, first, end))
    elements = [tensor[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))].ravel() for box in found]
    np.testing.assert_array_equal(np.concatenate([*elements, np.array([], int)]), np.arange(first, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(math.prod(size) > 0 for _, size in found)


@quick
@given(shape=SHAPES, seed=SEEDS)
def test_overlap_is_a_common_element(partition, index_of, shape, seed):
    rng = np.random.default_rng(seed)
    for one, other in itertools.product(partition(rng, "w", shape, 3), partition(rng, "w", shape, 3)):
        held = np.zeros(shape, dtype=int)
        held[index_of(one)] += 1
        held[index_of(other)] += 1
        assert bool(intersection(one, other).elements) == bool((held == 2).any())


@quick
@given(sizes=st.lists(st.integers(0, 10**12), max_size=30), ranks=st.integers(1, 9))
def test_ranks_share_the_bytes(sizes, ranks):
    shares = [share(sizes, rank, ranks) for rank in range(ranks)]
    assert [at for part in shares for at in part] == list(range(len(sizes)))
    assert all(sum(sizes[at] for at in part) <= sum(sizes) / ranks + max(sizes, default=0) for part in shares)
