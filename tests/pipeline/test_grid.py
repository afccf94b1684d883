"""The grid says what the timeline says, in the columns that there are."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.errors import ScheduleError
from hpcllm.pipeline import grid
from hpcllm.pipeline.grid import CUT, common_tick, fit, round_step
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import Times, simulate

NAMES = st.sampled_from(sorted(SCHEDULES))
WHOLE = st.integers(1, 4)
MULTIPLES = st.sampled_from([1, 2, 3, 0.5, 1.3]) | st.floats(0.1, 9)  # of a forward pass: with and without a tick


def timeline(name="1f1b", ranks=2, microbatches=3, **times):
    try:
        return simulate(make_schedule(name, ranks, microbatches), Times(**times))
    except ScheduleError:
        return simulate(make_schedule("1f1b", ranks, microbatches), Times(**times))


def rows(timeline, columns):
    found = fit([timeline.spans], columns)
    return found, [found.row(spans, timeline.makespan) for spans in timeline.spans]


def test_the_pictures_of_the_docstring_are_what_is_printed():
    pictures = [line.split("rank ")[1:] for line in grid.__doc__.splitlines() if line.startswith("rank")]
    _, wide = rows(timeline(), 120)
    _, narrow = rows(timeline(), 12)
    for rank, (left, right) in enumerate(pictures):
        assert left.split(maxsplit=1)[1].rstrip() == wide[rank]
        assert right.split(maxsplit=1)[1].rstrip() == narrow[rank]


@given(NAMES, st.integers(1, 6), st.integers(1, 9), WHOLE, WHOLE)
def test_with_room_the_names_are_the_work_in_order_and_the_points_are_the_idle_ticks(name, ranks, m, forward, weight):
    made = timeline(name, ranks, m, forward=2 * forward, backward=4 * weight, weight=2 * weight)
    found, drawn = rows(made, 10_000)
    assert found.named
    assert found.tick > 0
    for row, work, idle in zip(drawn, made.schedule.work(), made.idle_share, strict=True):
        words = re.sub("-+", "", row).split()
        assert [word for word in words if word != "."] == [str(action) for action in work]
        assert words.count(".") == pytest.approx(idle * made.makespan / found.tick)


@given(NAMES, st.integers(1, 6), st.integers(1, 9), st.integers(20, 300))
def test_capitals_start_actions_where_a_tick_has_a_column(name, ranks, m, columns):
    made = timeline(name, ranks, m)
    found, drawn = rows(made, columns)
    if found.named or CUT in drawn[0]:
        return
    for row, work in zip(drawn, made.schedule.work(), strict=True):
        assert re.sub("[^A-Z]", "", row) == "".join(action.op for action in work)


@settings(max_examples=50)
@given(NAMES, st.integers(1, 9), st.integers(1, 30), st.integers(20, 200), MULTIPLES, st.floats(0, 1))
def test_no_row_is_wider_than_the_columns(name, ranks, m, columns, backward, send):
    made = timeline(name, ranks, m, backward=backward, weight=backward / 3, send=send)
    found, drawn = rows(made, columns)
    assert max(map(len, drawn)) <= columns
    assert len(found.axis(made.makespan)) <= columns + 12  # its last number may stand out
    assert len(found.note("ticks", made.makespan)) < 120


def test_several_timelines_share_one_scale():
    short, long = timeline(microbatches=2), timeline(microbatches=20)
    alone, together = fit([long.spans], 80), fit([short.spans, long.spans], 80)
    assert together.scale == alone.scale


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([1.0, 0.5, 1 / 3, 0.1, 1e-6, 7e5]))
def test_the_tick_measures_all_durations_and_nothing_larger_does(counts, unit):
    found = common_tick([count * unit for count in counts], longest=50 * unit)
    assert found == pytest.approx(math.gcd(*counts) * unit)


def test_durations_with_nothing_in_common_have_no_tick():
    assert common_tick([1.0, 2**0.5], longest=100.0) == 0.0


@given(st.floats(1e-9, 1e9))
def test_marks_are_at_round_numbers(least):
    step = round_step(least)
    assert least * (1 - 1e-9) <= step <= 2.5 * least * (1 + 1e-9)
    assert f"{step:.0e}"[0] in "125"


@given(NAMES, st.integers(1, 6), st.integers(20, 60), st.integers(20, 100))
def test_a_row_that_is_too_long_loses_its_middle_and_nothing_else(name, ranks, m, columns):
    made = timeline(name, ranks, m)
    found, drawn = rows(made, columns)
    uncut = replace(found, columns=10_000)
    for row, spans in zip(drawn, made.spans, strict=True):
        left, cut, right = row.partition(CUT)
        whole = uncut.row(spans, made.makespan)
        assert whole.startswith(left)
        assert whole.endswith(right)
        assert cut or row == whole
    marks = found.axis(made.makespan).replace("~", "").split()
    assert set(marks) <= set(uncut.axis(made.makespan).split())


def test_a_grid_says_what_it_lost():
    for made, lost in [
        (timeline("1f1b", 8, 200), "at ~ not for the middle"),
        (timeline("1f1b", 8, 200, backward=2.05), "may be missing"),
        (timeline("1f1b", 2, 20), "no room for microbatch numbers"),
        (timeline(), "one cell: 1 tick"),
    ]:
        assert lost in rows(made, 80)[0].note("ticks", made.makespan)
