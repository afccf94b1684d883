"""Where the seconds go: intervals add up to the time that passed, parts to the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.training.step_timer import BETWEEN, PARTS, STEP, StepTimer, split

seconds = st.floats(0, 100)
intervals = st.sampled_from([*STEP, *BETWEEN])


@given(st.lists(st.tuples(intervals, seconds, st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_intervals_and_waiting_add_up_to_the_time_that_has_passed(stretches):
    now = waited = 100.0
    timer = StepTimer(lambda: waited, lambda: now)
    for interval, length, share, reading in stretches:
        now, waited = now + length, waited + share * length
        timer.end(interval, input_s=(1 - share) * reading * length)
    assert sum(timer.seconds.values()) == pytest.approx(now - 100, abs=1e-9)
    if any(name in BETWEEN for name, *_ in stretches):
        whole = sum(length for name, length, *_ in stretches if name in BETWEEN)
        inputs = sum((1 - s) * r * length for name, length, s, r in stretches if name in BETWEEN)
        assert sum(timer.seconds[name] for name in BETWEEN) == pytest.approx(whole - inputs, abs=1e-9)


@given(
    step_s=st.floats(1e-6, 100),
    means=st.fixed_dictionaries(dict.fromkeys((*STEP, "waited"), seconds)),
    tensor_share=st.floats(0, 1),
    bubble=st.floats(0, 1),
)
def test_the_parts_of_a_step_add_up_to_it(step_s, means, tensor_share, bubble):
    parts = split(step_s, means, tensor_share * means["waited"], bubble)
    assert tuple(parts) == PARTS
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(step_s)


@given(means=st.fixed_dictionaries(dict.fromkeys((*STEP, "waited"), seconds)), bubble=st.floats(0, 0.9))
def test_a_bubble_is_no_more_than_was_waited_nor_than_the_schedule_idles(means, bubble):
    step_s = sum(means.values()) + 1
    parts = split(step_s, means, 0.0, bubble)
    assert parts["bubble"] <= means["waited"] + 1e-9
    assert parts["bubble"] <= means["compute"] * bubble / (1 - bubble) + 1e-9
    assert parts["bubble"] + parts["communication"] == pytest.approx(means["waited"], abs=1e-9)
    assert parts["compute"] == pytest.approx(means["compute"])


def test_waiting_inside_split_layers_is_no_bubble():
    means = {"compute": 2.0, "optimizer": 0.0, "input": 0.0, "other": 0.0, "waited": 1.0}
    assert split(3.0, means, tensor_wait_s=1.0, bubble=0.5)["bubble"] == 0
    assert split(3.0, means, tensor_wait_s=0.0, bubble=0.25)["bubble"] == pytest.approx(2 / 3)
