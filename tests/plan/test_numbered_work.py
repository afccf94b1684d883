"""Work by numbers against the work itself: the same passes, in an order in which they can happen, at the same times."""

from __future__ import annotations

import random

import pytest

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.clock import clock, in_order
from hpcllm.pipeline.schedules import make_work
from hpcllm.plan.numbered_work import numbered_work

SHAPES = [
    (name, ranks, chunks, microbatches)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 1), ("interleaved", 3))
    for ranks in (1, 2, 5)
    for microbatches in (1, 3, 8, 21)
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pass_is_there_once_behind_its_source(shape):
    work, (_, rows) = numbered_work(*shape), make_work(shape[0], shape[1], shape[3], shape[2])
    assert sorted(number for row in work.rows for number in row) == list(range(1, sum(map(len, rows)) + 1))
    for rank, (numbers, actions) in enumerate(zip(work.rows, rows, strict=True)):
        assert numbers == sorted(numbers)
        lanes = [work.lanes[work.lane[number - 1]] for number in numbers]
        assert [(lane.rank, lane.op, lane.chunk) for lane in lanes] == [(rank, a.op, a.chunk) for a in actions]
    assert all(source < number for number, source in enumerate(work.source, 1))


@pytest.mark.parametrize("send", [0.0, 0.37])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_clock_says_the_same_to_the_last_bit(shape, send):
    work, draw = numbered_work(*shape), random.Random(str(shape)).random
    durations = [draw() for _ in work.lanes]
    of_lane = {(lane.rank, lane.op, lane.chunk): taken for lane, taken in zip(work.lanes, durations, strict=True)}
    placement, rows = make_work(shape[0], shape[1], shape[3], shape[2])
    done = clock(in_order(placement, rows), lambda rank, action: of_lane[rank, action.op, action.chunk], send)
    ends = {(each.rank, each.action): each.end for each in done}
    found = work.ends(durations, send)
    for rank, (numbers, actions) in enumerate(zip(work.rows, rows, strict=True)):
        assert [found[number] for number in numbers] == [ends[rank, action] for action in actions]
    assert work.rank_ends(durations, send) == [ends[rank, row[-1]] for rank, row in enumerate(rows)]


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(ScheduleError, match="zb-v divides"):
        numbered_work("zb-v", 4, 3, 8)
