"""The clock by its definition, and what the papers say of their schedules, exactly and in every shape."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.schedules import SCHEDULES, Schedule, forward_only, make_schedule
from hpcllm.pipeline.timing import Timeline, Times, simulate
from tests.pipeline.shapes import chunks_of, made, shapes, small

numbers = st.integers(0, 12).map(lambda n: Fraction(n, 4))


@st.composite
def some_times(draw, stages: int) -> Times:
    """Exact times, of all ranks alike or of each virtual stage; sometimes 0."""
    each = st.tuples(*[numbers] * stages) if draw(st.booleans()) else numbers
    weight, more = draw(each), draw(each)
    backward = tuple(map(sum, zip(weight, more, strict=True))) if isinstance(weight, tuple) else weight + more
    return Times(draw(each), backward, weight, draw(numbers), draw(st.booleans()))


def of_chunk(timeline: Timeline, rank: int, action: Action, times: Times) -> Fraction:
    """How long an action takes, by the words of Times."""
    placement = timeline.schedule.placement
    stage = placement.stage(rank, action.chunk)
    f, b, w = (
        each[stage] if isinstance(each, tuple) else each / placement.chunks
        for each in (times.forward, times.backward, times.weight)
    )
    again = f if times.recompute else 0
    return {"F": f, "B": b + again, "I": b - w + again, "W": w}[action.op]


@given(shapes(), st.data())
@settings(max_examples=100)
def test_work_starts_when_its_rank_is_free_and_its_input_is_there_and_not_later(shape, data):
    schedule = make_schedule(*shape)
    placement = schedule.placement
    times = data.draw(some_times(placement.stages))
    timeline = simulate(schedule, times)
    made_at = {}  # activation or gradient, microbatch, stage -> when
    for rank, row in enumerate(timeline.spans):
        for action, start, end in row:
            assert end - start == of_chunk(timeline, rank, action, times)
            if action.op is not Op.BACKWARD_WEIGHT:
                made_at[action.op is Op.FORWARD, action.microbatch, placement.stage(rank, action.chunk)] = end
    for rank, row in enumerate(timeline.spans):
        assert [action for action, _, _ in row] == schedule.work()[rank]
        free = 0
        for action, start, end in row:
            forward, stage = action.op is Op.FORWARD, placement.stage(rank, action.chunk)
            source = stage - 1 if forward else stage + 1
            there = 0
            if 0 <= source < placement.stages and action.op is not Op.BACKWARD_WEIGHT:
                there = made_at[forward, action.microbatch, source]
                there += times.send if placement.home(source)[0] != rank else 0
            assert start == max(free, there)
            free = end


@given(shapes(), st.data())
@settings(max_examples=60)
def test_makespan_and_idle_shares_follow_from_the_spans(shape, data):
    schedule = make_schedule(*shape)
    timeline = simulate(schedule, data.draw(some_times(schedule.placement.stages)))
    assert timeline.makespan == max(end for row in timeline.spans for _, _, end in row)
    for row, idle in zip(timeline.spans, timeline.idle_share, strict=True):
        busy = sum(end - start for _, start, end in row)
        assert idle * timeline.makespan == timeline.makespan - busy
        assert 0 <= idle <= 1
    assert min(timeline.idle_share) <= timeline.bubble <= max(timeline.idle_share)


def idle(shape, times: Times) -> Fraction:
    """What each rank idles, in the unit of the times; all ranks have the same work."""
    timeline = simulate(made(*shape), times)
    shares = set(timeline.idle_share)
    assert len(shares) == 1
    return shares.pop() * timeline.makespan


def exact(f, b, w, recompute=False) -> Times:
    return Times(Fraction(f), Fraction(b), Fraction(w), Fraction(0), recompute)


UNIT = exact(1, 2, 1)
SEVERAL = [UNIT, exact(1, 1, 0), exact(3, 7, 2), exact(1, 2, 1, recompute=True)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_the_known_share_whatever_the_times(name):
    for _, p, m, _ in small(name):
        for times in SEVERAL:
            assert simulate(made(name, p, m, 1), times).bubble == Fraction(p - 1, m + p - 1)


def test_interleaving_divides_the_bubble_by_the_chunks():
    for shape in small("interleaved"):
        _, p, m, v = shape
        for times in SEVERAL:
            if m % p == 0:
                assert simulate(made(*shape), times).bubble == Fraction(p - 1, v * m + p - 1)
            a_chunk = Fraction(times.forward + times.backward + (times.forward if times.recompute else 0)) / v
            late = (v - 1) * max(0, p - m)  # fewer microbatches than ranks come late to each next chunk
            assert idle(shape, times) == (p - 1 + late) * a_chunk


def test_zb_h1_idles_what_its_paper_says_and_that_with_the_memory_of_1f1b():
    for shape in small("zb-h1"):
        _, p, m, _ = shape
        assert idle(shape, UNIT) == max(p - 1, 2 * p - 1 - m)
        assert simulate(made(*shape)).peak_live == (min(m, p),) * p  # of 1f1b the same on rank 0, and less on others


@given(numbers, numbers, numbers, st.integers(1, 7), st.integers(0, 9))
@settings(max_examples=80)
def test_zb_h1_idles_that_for_all_times_in_which_w_is_the_least(f, i, w, p, more):
    f, i = max(f, w), max(i, w)
    assert idle(("zb-h1", p, p + more, 1), exact(f, i + w, w)) == (p - 1) * (f + i - w)


def test_zb_v_idles_half_of_zb_h1_with_the_same_memory():
    for shape in small("zb-v"):
        _, p, m, _ = shape
        assert idle(shape, UNIT) == Fraction(max(p - 1, 4 * p - 2 - 2 * m), 2)
        assert max(simulate(made(*shape)).peak_live) == 2 * min(m, p)


@given(shapes(("zb-h1", "zb-v")), numbers, numbers, numbers)
@settings(max_examples=80)
def test_splitting_the_backward_pass_never_makes_a_step_longer_than_1f1b(shape, f, i, w):
    _, p, m, _ = shape
    times = exact(f, i + w, w)
    most = simulate(make_schedule("1f1b", p, m), times).makespan
    assert simulate(make_schedule(*shape), times).makespan <= most


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_held_are_those_from_a_forward_pass_to_the_end_of_its_backward_pass(name):
    for shape in small(name)[::4]:
        timeline = simulate(made(*shape))
        for row, peak in zip(timeline.spans, timeline.peak_live, strict=True):
            live, most = set(), 0
            for action, _, _ in row:
                if action.op is Op.FORWARD:
                    live.add((action.microbatch, action.chunk))
                most = max(most, len(live))
                if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                    live.remove((action.microbatch, action.chunk))
            assert most == peak
            assert not live


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_never_idles(name):
    for v in chunks_of(name):
        assert simulate(made(name, 1, 5, v), UNIT).bubble == 0


def test_activations_held_are_what_each_schedule_promises():
    for _, p, m, _ in small("gpipe"):
        assert simulate(made("gpipe", p, m, 1)).peak_live == (m,) * p
        assert simulate(made("1f1b", p, m, 1)).peak_live == tuple(min(m, p - rank) for rank in range(p))
    for shape in small("interleaved"):
        _, p, m, v = shape
        if v > 1 and m % p == 0:
            want = tuple(min(v * m, 2 * (p - 1 - rank) + (v - 1) * p + 1) for rank in range(p))
            assert simulate(made(*shape)).peak_live == want


def test_each_boundary_between_ranks_is_crossed_once_each_way_by_each_microbatch():
    for name in SCHEDULES:
        for shape in small(name):
            _, p, m, v = shape
            boundaries = 0 if p == 1 else p * v - 1 - (name == "zb-v")  # at the turn of the v is one rank
            assert sum(simulate(made(*shape)).messages) == 2 * boundaries * m


@pytest.mark.parametrize("kind", ["loop", "v"])
def test_validation_waits_no_longer_than_it_must(kind):
    """A loop idles as its pipe fills, if it can be filled; in a v the last rank begins late, the first ends late."""
    for p in range(1, 6):
        for m in range(1, 12):
            for v in (1, 2) if kind == "v" else (1, 2, 3):
                schedule = forward_only(Placement(p, v, kind), m)
                ticks = simulate(schedule, Times(forward=v)).makespan - v * m
                late = (v - 1) * ((p - 1) if kind == "v" else max(0, p - m))
                assert ticks == p - 1 + late


LEAN = [Placement(p, v, kind) for p in (2, 3, 5) for v, kind in ((2, "v"), (2, "loop"), (3, "loop"))]


@pytest.mark.parametrize("placement", LEAN, ids=str)
def test_in_validation_at_most_one_activation_waits_on_a_rank(placement):
    for m in range(1, 16) if placement.kind == "v" else range(placement.ranks, 16, placement.ranks):
        changes = [[] for _ in range(placement.ranks)]  # of each rank: when something is there, when it is used
        made_at, timeline = {}, simulate(forward_only(placement, m), Times(forward=placement.chunks))
        spans = [(rank, *span) for rank, row in enumerate(timeline.spans) for span in row]
        for rank, action, start, end in spans:
            stage = placement.stage(rank, action.chunk)
            made_at[action.microbatch, stage] = end
            changes[rank].append((start, -1 if stage else 0))
        for m_there, stage in made_at:
            if stage + 1 < placement.stages:
                changes[placement.home(stage + 1)[0]].append((made_at[m_there, stage], 1))
        for events in changes:
            assert max(itertools.accumulate(change for _, change in sorted(events))) <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward": -1.0}, "forward = -1.0 is no duration"),
        ({"backward": math.nan}, "backward = nan is no duration"),
        ({"send": math.inf}, "send = inf is no duration; it has to be 0 or more, and finite"),
        ({"weight": 3.0}, "weight = 3.0 is a part of backward = 2.0"),
        ({"backward": (1.0, 2.0)}, "2 durations of backward and 1 of its part weight; both"),
        ({"forward": (1.0, -2.0)}, "forward = -2.0 is no duration"),
        ({"forward": (1.0, 1.0, 1.0)}, "3 durations, but the schedule has 4 virtual stages"),
        ({"backward": (1.0,) * 4, "weight": (1.0,) * 3}, "4 durations of backward and 3 of its"),
    ],
)
def test_times_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        simulate(make_schedule("zb-v", 2, 3), Times(**arguments))


def test_a_schedule_that_cannot_be_done_has_no_timeline():
    rows = (tuple(map(Action.parse, ["B0", "F0"])), tuple(map(Action.parse, ["F0", "B0"])))
    with pytest.raises(ScheduleError, match="rank 0 at B0 waits for rank 1"):
        simulate(Schedule("upside down", Placement(2), 1, rows))
    with pytest.raises(ScheduleError, match="rank 0 at B0 waits for itself to do F0"):
        simulate(Schedule("upside down", Placement(1), 1, rows[:1]))
