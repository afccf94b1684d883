"""However wrong the ranks' clocks are: what is found of them is right to within the error that is stated."""

from __future__ import annotations

import time

import pytest

from hpcllm.clocks import align
from hpcllm.waiting import Waits


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("step_s", [0.0, 1e-3, -2.5, 1e5])
def test_the_lead_of_a_clock_is_known_to_within_its_error(comm, step_s):
    lead_s = step_s * comm.rank  # perf_counter is one clock for the whole machine
    offset = align(comm, Waits(30.0), lambda: time.perf_counter() + lead_s)
    rounding_s = 1e-9 * (1 + abs(lead_s))
    assert abs(offset.lead_s - lead_s) <= offset.error_s + rounding_s
    assert (offset.error_s == 0) == (comm.rank == 0)


@pytest.mark.parallel([2, 3, 4])
def test_one_late_answer_does_not_spoil_it(comm):
    """The shortest round trip counts, so a clock that is read late once in a while is not believed."""
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls % 8 == 1:
            time.sleep(0.02)
        return time.perf_counter()

    assert align(comm, Waits(30.0), clock).error_s < 0.01
