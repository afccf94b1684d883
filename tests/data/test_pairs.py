"""Rows of pairs: every pair that fits, whole, its chosen document first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.data.packing import SplitArrays, read_batch
from hpcllm.data.pairs import check_any, pair_rows
from hpcllm.errors import DataError
from hpcllm.model.loss import IGNORED

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=20)


@settings(deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(1, 60), seed=st.integers(0, 99))
def test_a_row_is_a_pair_and_no_pair_is_cut(lengths, sequence, seed):
    documents = np.cumsum([0, *(length for pair in lengths for length in pair)]).astype(np.int64)
    tokens = np.arange(documents[-1], dtype=np.uint32)
    counted = np.random.default_rng(seed).random(len(tokens)) < 0.6
    rows = pair_rows(SplitArrays(tokens, documents, np.packbits(counted, bitorder="little")), sequence)
    fit = [i for i, (a, b) in enumerate(lengths) if a + b - 2 <= sequence and min(a, b) > 1]
    assert (rows.numbers.tolist(), rows.count, rows.pairs) == (fit, len(fit), len(lengths))
    batch = read_batch(rows, range(rows.count))
    for place, pair in enumerate(fit):
        inputs, targets, positions = batch.planes[:, place]
        at = 0
        for document in (2 * pair, 2 * pair + 1):
            first, end = documents[document : document + 2]
            part = slice(at, at + end - first - 1)
            assert inputs[part].tolist() == tokens[first : end - 1].tolist()
            assert targets[part].tolist() == np.where(counted, tokens.astype(int), IGNORED)[first + 1 : end].tolist()
            assert positions[part].tolist() == list(range(end - first - 1))
            at = part.stop
        assert (targets[at:] == IGNORED).all()
        assert batch.lengths[place].sum() == sequence
        assert batch.lengths[place][:2].tolist() == [lengths[pair][0] - 1, lengths[pair][1] - 1]


def test_a_run_without_a_pair_that_fits_is_told_so():
    split = SplitArrays(np.zeros(40, np.uint32), np.array([0, 20, 40]), np.full(5, 255, np.uint8))
    check_any(pair_rows(split, 38))
    with pytest.raises(DataError, match=r"none of 1 pairs fits into data\.sequence_length = 37"):
        check_any(pair_rows(split, 37))
