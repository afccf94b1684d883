"""The parts of the lost time add up to it, and each disturbance is found in the part that has its name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.pipeline.clock import in_order
from hpcllm.pipeline.explain import PARTS, explain, replay
from hpcllm.pipeline.measured import parse_trace
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import Times, simulate
from tests.pipeline.made_up_traces import as_text, made_up

NAMES = st.sampled_from(sorted(SCHEDULES))
RANKS, MICROBATCHES, SEEDS = st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 30)
SOME = st.sampled_from([0.0, 0.001, 0.02])
TINY = 1e-9
CAUSES = {  # what happens -> the parts that it may make other than zero, beside bubble
    "stages": {"imbalance"},
    "jitter": {"imbalance", "uneven"},
    "entry": {"late_start"},
    "gap": {"engine", "late_start"},  # what a rank does before its first action or wait is entering late
    "delay": {"exposed_communication"},
}


def explained(*shape, **disturbance):
    (measured,) = parse_trace(as_text(made_up(*shape, **disturbance)))
    return explain(measured)


@given(NAMES, RANKS, MICROBATCHES, SEEDS, SOME, SOME, SOME, SOME, SOME)
def test_the_parts_and_what_was_computed_add_up_to_the_step(name, ranks, m, seed, jitter, entry, delay, gap, slow):
    found = explained(name, ranks, m, seed, jitter=jitter, entry=entry, delay=delay, gap=gap, stages={0: slow})
    for rank in found.ranks:
        assert tuple(rank.lost_s) == tuple(PARTS)
        assert rank.useful_s + sum(rank.lost_s.values()) == pytest.approx(found.measured.end, abs=TINY)
        assert all(rank.lost_s[part] >= -1e-8 for part in ("bubble", "late_start", "engine", "exposed_communication"))


@pytest.mark.parametrize("cause", CAUSES)
@given(name=NAMES, ranks=RANKS, m=MICROBATCHES, seed=SEEDS)
def test_one_disturbance_is_found_under_its_name_alone(cause, name, ranks, m, seed):
    found = explained(name, ranks, m, seed, **{cause: {0: 0.005} if cause == "stages" else 0.02})
    for rank in found.ranks:
        other = {part: s for part, s in rank.lost_s.items() if part not in CAUSES[cause] and part != "bubble"}
        assert other == dict.fromkeys(other, pytest.approx(0, abs=1e-8))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_disturbance_that_delays_the_step_costs_something(cause):
    amount = {0: 0.005} if cause == "stages" else 0.02
    found = explained("1f1b", 3, 6, 1, **{cause: amount})
    part = next(part for part in reversed(PARTS) if part in CAUSES[cause])
    assert max(abs(rank.lost_s[part]) for rank in found.ranks) > 0.001


@given(NAMES, RANKS, MICROBATCHES)
def test_an_undisturbed_step_loses_the_bubble_that_was_foretold_and_nothing_else(name, ranks, m):
    found = explained(name, ranks, m)
    schedule = found.measured.schedule
    chunks = schedule.placement.chunks
    foretold = simulate(schedule, Times(0.01 * chunks, 0.02 * chunks, 0.01 * chunks))
    if not any(action.op == "B" for row in schedule.work() for action in row):  # made-up actions all take 10 ms
        assert found.ideal_s == pytest.approx(foretold.makespan)
        assert [rank.lost_s["bubble"] for rank in found.ranks] == pytest.approx(
            [share * foretold.makespan for share in foretold.idle_share], abs=TINY
        )
    assert found.ideal_s == pytest.approx(found.measured.end)


def test_the_slow_stage_idles_less_and_the_others_wait_for_it():
    found = explained("1f1b", 4, 8, stages={2: 0.004})
    imbalance = [rank.lost_s["imbalance"] for rank in found.ranks]
    assert imbalance[2] < 0 < min(imbalance[:2] + imbalance[3:])


@given(NAMES, RANKS, MICROBATCHES, st.integers(1, 5), st.integers(1, 5))
def test_a_replay_with_a_schedule_s_own_times_is_its_timeline(name, ranks, m, forward, weight):
    timeline = simulate(make_schedule(name, ranks, m), Times(forward, 3 * weight, weight))
    times = {(rank, a): end - start for rank, row in enumerate(timeline.spans) for a, start, end in row}
    schedule = timeline.schedule
    again = replay(list(in_order(schedule.placement, schedule.work())), times)
    for row, spans in zip(again, timeline.spans, strict=True):
        assert [a for a, _, _ in row] == [a for a, _, _ in spans]
        assert [s for _, s, _ in row] == pytest.approx([s for _, s, _ in spans])


@given(NAMES, RANKS, MICROBATCHES, SEEDS)
def test_waiting_is_not_the_engine_s_work_however_often_it_is_told(name, ranks, m, seed):
    """Waits that overlap, as those of another thread may, count once."""
    trace = made_up(name, ranks, m, seed, delay=0.02, gap=0.002)
    (once,) = map(explain, parse_trace(as_text(trace)))
    trace["traceEvents"] += [event for event in trace["traceEvents"] if event.get("cat") == "wait"]
    (twice,) = map(explain, parse_trace(as_text(trace)))
    for one, two in zip(once.ranks, twice.ranks, strict=True):
        assert two.waited_s == pytest.approx(one.waited_s)
        assert two.own_engine_s == pytest.approx(one.own_engine_s)
        assert math.isclose(two.lost_s["engine"], one.lost_s["engine"], abs_tol=TINY)
