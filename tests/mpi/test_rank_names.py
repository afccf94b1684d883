"""Ranks in words are the ranks: what a message says of them can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.mpi.rank_names import name_ranks, named_ranks, without_ranks

SETS = st.one_of(
    st.frozensets(st.integers(0, 40), min_size=1),
    st.builds(lambda first, count, step: frozenset(range(first, first + count * step, step)), st.integers(0, 9999),
              st.integers(1, 600), st.integers(1, 64)),
)  # fmt: skip


@given(SETS)
def test_a_set_of_ranks_reads_back_from_the_middle_of_a_sentence(ranks):
    text = f"hop 3 of a sum over {len(ranks)} ranks, from {name_ranks(ranks)}, lane 1"
    assert named_ranks(text) == ranks
    assert named_ranks(without_ranks(text)) == frozenset()


@given(SETS, SETS)
def test_all_sets_in_a_sentence_count(one, other):
    assert named_ranks(f"{name_ranks(one)}; and stage 2 ({name_ranks(other)})") == one | other


@given(st.integers(0, 9999), st.integers(3, 600), st.integers(1, 64))
def test_ranks_at_equal_distance_take_few_letters_however_many(first, count, step):
    assert len(name_ranks(range(first, first + count * step, step))) < 30


@given(SETS, st.integers(1, 5))
def test_a_short_form_is_short_and_counts(ranks, runs):
    text = name_ranks(ranks, runs)
    assert len(text) < 20 + 16 * runs
    assert named_ranks(text) <= ranks
    assert named_ranks(text) == ranks or f"({len(ranks)} ranks)" in text


@pytest.mark.parametrize("text", ["512 ranks to agree", "stage 3", "ranks of one node", "rank", "ranked 5", ""])
def test_other_words_name_nobody(text):
    assert named_ranks(text) == frozenset()
