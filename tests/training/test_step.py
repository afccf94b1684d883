"""Clipping: gradients are made shorter than their limit, or left as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.config.schema import Config, OptimizerConfig
from hpcllm.training.step import LossScale, update

norms = st.floats(1e-6, 1e6)


def factor_of(norm: float, limit: float, scale: float) -> float:
    """What an update multiplies its gradients with, besides what undoes the loss scale."""
    factors: list[float] = []
    optimizer = SimpleNamespace(update=lambda _, factor: factors.append(factor))
    config = Config(optimizer=OptimizerConfig(clip_norm=limit))
    assert update(SimpleNamespace(config=config, loss_scale=LossScale(scale), optimizer=optimizer), norm, 0.1)
    (factor,) = factors
    return factor * scale


@given(norms, norms, st.sampled_from([1.0, 1024.0]))
def test_a_norm_above_the_limit_becomes_the_limit_and_one_below_stays(norm, limit, scale):
    factor = factor_of(norm, limit, scale)
    assert factor == 1.0 if norm <= limit else factor * norm == pytest.approx(limit)


@given(norms, st.sampled_from([1.0, 1024.0]))
def test_without_a_limit_gradients_stay_as_they_are(norm, scale):
    assert factor_of(norm, 0.0, scale) == 1.0
