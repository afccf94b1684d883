"""The bound of a schedule against the run of its actions: never above, and exact where it says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.pipeline.schedules import SCHEDULES, make_placement
from hpcllm.plan.time.timeline import BOUNDS, StageTimes, earliest_ends, run

SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])


@st.composite
def steps(draw, alike=False, messages=(0.0, 0.1, 2.0)):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    usual = SCHEDULES[name].placement.chunks
    chunks = draw(st.integers(1, 3)) if SCHEDULES[name].any_chunks else usual
    count = ranks * chunks
    one = st.tuples(SECONDS, SECONDS, st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from(messages))
    drawn = [draw(one)] * count if alike else draw(st.lists(one, min_size=count, max_size=count))
    times = [StageTimes(f, f + b, f * w, send, send) for f, b, w, send in drawn]
    return name, ranks, chunks, microbatches, times


@settings(max_examples=300, deadline=None)
@given(steps())
def test_no_rank_ends_before_its_bound(step):
    name, ranks, chunks, microbatches, times = step
    ends = run(name, ranks, chunks, microbatches, times, blocking=False)
    bounds = earliest_ends(name, make_placement(name, ranks, microbatches, chunks), microbatches, times)
    assert len(bounds) == ranks
    for bound_s, end_s in zip(bounds, ends, strict=True):
        assert bound_s <= end_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(steps(alike=True, messages=(0.0,)))
def test_exact_where_stages_are_alike(step):
    name, ranks, _, microbatches, times = step
    if name in ("1f1b", "gpipe"):
        ends = run(name, ranks, 1, microbatches, times, blocking=False)
        bounds = earliest_ends(name, make_placement(name, ranks, microbatches), microbatches, times)
        assert max(bounds) == pytest.approx(max(ends))


def test_every_schedule_has_one():
    assert set(BOUNDS) == set(SCHEDULES)
