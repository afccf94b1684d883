"""Where the seconds go: laps add up to the time that passed, parts to the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.laps import BETWEEN, PARTS, STEP, Laps, split

seconds = st.floats(0, 100)
laps = st.sampled_from([*STEP, *BETWEEN])


@given(st.lists(st.tuples(laps, seconds, st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_laps_and_waiting_add_up_to_the_time_that_has_passed(stretches):
    now = waited = 100.0
    clock = Laps(lambda: waited, lambda: now)
    for lap, length, share, reading in stretches:
        now, waited = now + length, waited + share * length
        clock.end(lap, input_s=(1 - share) * reading * length)
    assert sum(clock.seconds.values()) == pytest.approx(now - 100, abs=1e-9)
    if any(lap in BETWEEN for lap, *_ in stretches):
        whole = sum(length for lap, length, *_ in stretches if lap in BETWEEN)
        inputs = sum((1 - s) * r * length for lap, length, s, r in stretches if lap in BETWEEN)
        assert sum(clock.seconds[lap] for lap in BETWEEN) == pytest.approx(whole - inputs, abs=1e-9)


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
