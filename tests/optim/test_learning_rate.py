"""The learning rate rises in a line, reaches its peak, falls to its last value, and is never anything else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.config.schema import OptimizerConfig
from hpcllm.optim.adamw import learning_rate


@st.composite
def runs(draw) -> tuple[int, OptimizerConfig]:
    steps = draw(st.integers(1, 400))
    return steps, OptimizerConfig(
        learning_rate=draw(st.floats(1e-6, 10)),
        warmup_steps=draw(st.integers(0, steps - 1)),
        final_fraction=draw(st.floats(0, 1)),
    )


@settings(deadline=None)
@given(runs())
def test_up_in_a_line_then_down_and_never_past_its_ends(run):
    steps, config = run
    warmup, peak = config.warmup_steps, config.learning_rate
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert rates[:warmup] == pytest.approx([peak * (step + 1) / warmup for step in range(warmup)])
    down = rates[max(0, warmup - 1) :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(down))
    assert max(rates) <= peak * (1 + 1e-12)
    if warmup:
        assert max(rates) == pytest.approx(peak)
    assert rates[-1] == pytest.approx(peak * config.final_fraction, rel=1e-9, abs=1e-15 * peak)


@settings(deadline=None)
@given(runs(), st.integers(0, 1000))
def test_after_its_last_step_it_stays(run, more):
    steps, config = run
    assert learning_rate(steps + more, steps, config) == learning_rate(steps - 1, steps, config)


@settings(deadline=None)
@given(runs())
def test_it_scales_with_the_peak(run):
    steps, config = run
    double = OptimizerConfig(
        learning_rate=2 * config.learning_rate,
        warmup_steps=config.warmup_steps,
        final_fraction=config.final_fraction,
    )
    for step in range(steps):
        want = 2 * learning_rate(step, steps, config)
        assert learning_rate(step, steps, double) == pytest.approx(want, rel=1e-12, abs=1e-300)
