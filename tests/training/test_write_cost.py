"""Where checkpoints are written: in the loop once that is measured to cost training less than behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.training.saving import LEAST_GAIN, LONGEST_TRIAL_S, WriteCost

STEPS = 4  # between two writes


def writes(cost: WriteCost, count: int, usual_s: float, behind_s: float, took_s: float, loop_s: float) -> list[bool]:
    """Tell it of so many writes and the steps before each; returns which of them were made in the loop.

    behind_s: what a write costs behind the training, half of it in the copy; took_s, loop_s: seconds from its begin.
    """
    made: list[bool] = []
    for _ in range(STEPS):
        cost.stepped(usual_s, is_writing=False)
    for _ in range(count):
        made.append(cost.wants_loop)
        if made[-1]:
            cost.wrote(0.0, loop_s, in_loop=True)
            continue
        cost.stepped(usual_s + behind_s / 2, is_writing=True)
        for _ in range(STEPS - 1):
            cost.stepped(usual_s, is_writing=False)
        cost.wrote(behind_s / 2, took_s, in_loop=False)
    return made


seconds = st.floats(0.01, 100.0)


@given(seconds, seconds, seconds, st.floats(0.0, 1.0))
def test_the_way_that_costs_less_is_kept_and_the_loop_is_tried_once(usual_s, behind_s, took_s, share):
    """In the loop a write takes no more than beside the steps."""
    loop_s = share * took_s
    made = writes(WriteCost(), 12, usual_s, behind_s, took_s, loop_s)
    assert not any(made[:3])  # the first allocates, two are counted
    if any(made):
        assert made[3]
        wins = loop_s < LEAST_GAIN * behind_s
        if abs(loop_s / (LEAST_GAIN * behind_s) - 1) > 1e-6:  # else rounding decides
            assert made[4:] == [wins] * 8
    else:  # not worth a try, or too long a one
        assert took_s > LONGEST_TRIAL_S or behind_s <= took_s / 4 * (1 + 1e-6)


def test_a_write_that_costs_the_steps_nothing_stays_behind_them():
    assert not any(writes(WriteCost(), 12, usual_s=1.0, behind_s=0.0, took_s=3.0, loop_s=0.5))


def test_a_trial_of_minutes_is_not_made():
    assert not any(writes(WriteCost(), 12, 1.0, behind_s=50.0, took_s=LONGEST_TRIAL_S + 1, loop_s=1.0))


@pytest.mark.parametrize("beside", [True, False])
def test_without_steps_to_compare_with_nothing_is_decided(beside):
    """Each step beside a write, or none at all."""
    cost = WriteCost()
    for _ in range(12):
        for _ in range(STEPS if beside else 0):
            cost.stepped(2.0, is_writing=True)
        cost.wrote(1.0, 2.0, in_loop=False)
    assert not cost.wants_loop
