"""However wrong the ranks' clocks are: what is found of them is right to within the error that is stated."""

from __future__ import annotations

import itertools
import time

import pytest

from hpcllm.mpi.clock_sync import measure_offset
from hpcllm.mpi.wait import Waits


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("step_s", [0.0, 1e-3, -2.5, 1e5])
def test_the_lead_of_a_clock_is_known_to_within_its_error(comm, step_s):
    lead_s = step_s * comm.rank  # perf_counter is one clock for the whole machine
    offset = measure_offset(comm, Waits(30.0), lambda: time.perf_counter() + lead_s)
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

    assert measure_offset(comm, Waits(30.0), clock).error_s < 0.01


@pytest.mark.parallel([2, 3])
def test_the_middle_of_a_round_trip_is_what_is_compared(comm):
    """Rank 0 always reads 0.9, the others 0 when they ask and 1 when they hear: by 0.4 they are behind."""
    readings = itertools.cycle([0.0, 1.0])
    offset = measure_offset(comm, Waits(30.0), lambda: next(readings) if comm.rank else 0.9)
    wanted = (-0.4, 0.5) if comm.rank else (0.0, 0.0)
    assert (offset.lead_s, offset.error_s) == pytest.approx(wanted)
