"""Figures: standard errors as statisticians know them, intervals that hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.evaluation.figures import exponential, mean, ratio, share

numbers = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50).map(np.array)
hits = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=50).map(np.array)


@given(numbers)
def test_the_error_of_a_mean_is_the_deviation_of_the_sample_over_the_root_of_its_size(values):
    figure = mean(values)
    assert figure.value == pytest.approx(values.mean(), abs=1e-9)
    assert figure.stderr == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), abs=1e-9)
    assert figure.high - figure.low == pytest.approx(2 * 1.96 * figure.stderr, rel=1e-4, abs=1e-12)


@given(hits)
def test_a_share_and_its_interval_lie_between_0_and_1_and_have_some_width(values):
    figure = share(values)
    assert 0 <= figure.low <= figure.value <= figure.high <= 1
    assert figure.high - figure.low > 0.02
    assert (figure.stderr is None) == (len(values) == 1)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.98])
def test_about_95_of_100_intervals_of_shares_hold_the_truth(truth):
    draw = np.random.default_rng(0)
    samples = (draw.random((2000, 60)) < truth).astype(float)
    found = [share(sample) for sample in samples]
    assert 0.92 < np.mean([each.low <= truth <= each.high for each in found]) < 0.99


def test_about_95_of_100_intervals_of_ratios_hold_the_truth():
    draw = np.random.default_rng(1)
    tokens = draw.integers(1, 60, (2000, 80)).astype(float)
    nats = tokens * draw.normal(3.0, 0.5, tokens.shape)
    found = [ratio(*pair) for pair in zip(nats, tokens, strict=True)]
    assert 0.92 < np.mean([each.low <= 3.0 <= each.high for each in found]) < 0.97
    assert np.median([each.stderr for each in found]) == pytest.approx(np.std([e.value for e in found]), rel=0.05)


def test_a_perplexity_has_the_interval_of_its_loss_and_no_number_too_large():
    loss = ratio(np.array([2.0, 4.0, 6.0]), np.ones(3))
    found = exponential(loss)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((loss.low, loss.high))
    assert found.stderr == pytest.approx(math.exp(4) * loss.stderr)
    huge = exponential(ratio(np.array([900.0, 901.0]), np.ones(2)))
    assert huge.as_dict()["value"] is None
