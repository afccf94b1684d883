"""Rows hold every token that can be learned once, in both packings, and are the same from any position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.data.packing import SplitArrays, make_rows, read_batch, read_samples
from hpcllm.data.sampler import Sampler
from hpcllm.model.loss import IGNORED

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=80)
PACKINGS = ["stream", "best-fit"]


def split_of(lengths, counted=None) -> SplitArrays:
    """Documents whose tokens are numbered through."""
    documents = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bits = None if counted is None else np.packbits(counted, bitorder="little")
    return SplitArrays(np.arange(documents[-1], dtype=np.uint32), documents, bits)


def laid_out(rows):
    """Inputs, targets and positions of all rows, and the number of the piece of each input."""
    batch = read_batch(rows, range(rows.count))
    pieces = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in batch.lengths])
    return *batch.planes, pieces


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_best_fit_loses_no_target_and_has_none_twice(lengths, sequence):
    split = split_of(lengths)
    rows = make_rows(split, sequence, "best-fit", masked=True)
    if not rows.count:
        assert max(lengths) == 1
        return
    inputs, targets, positions, pieces = laid_out(rows)
    counts = targets != IGNORED
    assert np.array_equal(targets[counts], inputs[counts] + 1)
    assert sorted(targets[counts]) == sorted(set(split.tokens) - set(split.documents))  # all but first tokens
    first_of = np.searchsorted(split.documents, inputs, "right")
    for row in range(rows.count):
        for piece in range(pieces[row].max() + 1):
            here = (pieces[row] == piece) & counts[row]
            assert len(set(first_of[row][here])) <= 1
            assert np.array_equal(positions[row][pieces[row] == piece], np.arange((pieces[row] == piece).sum()))
    whole = [length - 1 for length in lengths if 1 < length <= sequence + 1]
    starts = {int(start) for start, length in zip(split.documents, lengths, strict=False) if 1 < length <= sequence + 1}
    assert len(whole) == len(starts) == sum(int(x) in starts for x in inputs[(positions == 0) & counts])  # none is cut


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_best_fit_opens_a_row_only_where_none_has_room(lengths, sequence):
    """No two rows of a window could be one: less than half of a row is free in all but one."""
    rows = make_rows(split_of(lengths), sequence, "best-fit", masked=True)
    filled = [(read_batch(rows, [row]).planes[1] != IGNORED).sum() for row in range(rows.count)]
    for start, end in zip([0, *rows.ends[:-1]], rows.ends, strict=True):
        assert sum(2 * used <= sequence for used in filled[start:end]) <= 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_the_stream_stops_at_borders_and_counts_no_target_across_them(lengths, sequence):
    split = split_of(lengths)
    masked, plain = (make_rows(split, sequence, "stream", masked=mask) for mask in (True, False))
    if not masked.count:
        return
    inputs, targets, positions, _ = laid_out(masked)
    assert np.array_equal(inputs.ravel(), np.arange(inputs.size))
    assert np.array_equal(targets == IGNORED, np.isin(inputs + 1, split.documents))
    begins = np.isin(inputs, split.documents)
    begins[:, 0] = True
    assert np.array_equal(positions == 0, begins)
    assert np.all(np.diff(positions, axis=1)[~begins[:, 1:]] == 1)
    old_inputs, old_targets, old_positions, _ = laid_out(plain)
    assert np.array_equal(old_inputs, inputs)
    assert np.array_equal(old_targets, inputs + 1)
    assert np.array_equal(old_positions, np.tile(np.arange(sequence), (plain.count, 1)))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 40), st.sampled_from(PACKINGS), st.integers(0, 200), st.integers(1, 9))
def test_rows_are_the_same_from_any_position(lengths, sequence, packing, position, count):
    split = split_of(lengths)
    rows, again = (make_rows(split, sequence, packing, masked=True) for _ in range(2))
    if not rows.count:
        return
    sampler = Sampler(rows.count, 0)
    batch = read_samples(rows, sampler, position, count)
    for at in range(count):
        one = read_samples(again, sampler, position + at, 1)
        assert np.array_equal(one.planes[:, 0], batch.planes[:, at])
        assert np.array_equal(one.lengths[0], batch.lengths[at])


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 40), st.sampled_from(PACKINGS), st.integers(0, 99))
def test_a_token_without_its_bit_is_no_target(lengths, sequence, packing, seed):
    bits = np.random.default_rng(seed).integers(0, 2, sum(lengths)).astype(bool)
    rows, plain = (
        make_rows(split, sequence, packing, masked=True) for split in (split_of(lengths, bits), split_of(lengths))
    )
    if not rows.count:
        return
    targets, all_targets = (laid_out(each)[1] for each in (rows, plain))
    counts = (all_targets != IGNORED) & bits[np.maximum(all_targets, 0)]
    assert np.array_equal(targets, np.where(counts, all_targets, IGNORED))


@pytest.mark.parallel([1, 2, 3, 4])
def test_ranks_share_the_counting_of_rows(comm):
    lengths = np.random.default_rng(0).integers(1, 200, 3000)
    shared, alone = (make_rows(split_of(lengths), 64, "best-fit", True, each) for each in (comm, None))
    assert len(alone.ends) > 4
    assert np.array_equal(shared.ends, alone.ends)
