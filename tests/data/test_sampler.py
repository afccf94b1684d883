"""Each epoch is a permutation, another one each, and the state is the position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.errors import DataError


def epoch_of(sampler, epoch):
    return [sampler.index(epoch * sampler.samples + i) for i in range(sampler.samples)]


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**63 - 1), st.integers(0, 10**12))
def test_every_epoch_is_a_permutation(samples, seed, epoch):
    assert sorted(epoch_of(Sampler(samples, seed), epoch)) == list(range(samples))


@settings(deadline=None)
@given(st.integers(30, 700), st.integers(0, 2**63 - 2))
def test_epochs_and_seeds_differ(samples, seed):
    orders = [epoch_of(Sampler(samples, seed), epoch) for epoch in range(3)] + [epoch_of(Sampler(samples, seed + 1), 0)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("samples", [2, 3, 5, 16, 17, 100])
def test_each_sample_is_as_likely_at_each_place(samples):
    """Chi-square of who comes first, 20 seeds of 200 epochs: d degrees of freedom, mean d, sigma sqrt(2 d)."""
    epochs, seeds = 200, 20
    chi_square = 0.0
    for seed in range(seeds):
        first = [Sampler(samples, seed).index(epoch * samples) for epoch in range(epochs)]
        counts = np.bincount(first, minlength=samples)
        chi_square += float(((counts - epochs / samples) ** 2).sum() / (epochs / samples))
    freedom = seeds * (samples - 1)
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_no_sample_is_an_error_that_names_the_key():
    with pytest.raises(DataError, match="sequence_length"):
        Sampler(sample_count(8, 8), 0)


def test_neighbours_are_not_neighbours_after_the_shuffle():
    order = np.array(epoch_of(Sampler(5000, 0), 0))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(5000)
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 5 / np.sqrt(5000)


@given(st.integers(1, 10**6), st.integers(1, 5000))
def test_the_last_sample_just_fits(tokens, sequence_length):
    samples = sample_count(tokens, sequence_length)
    assert samples * sequence_length + 1 <= tokens or samples == 0
    assert (samples + 1) * sequence_length + 1 > tokens
