"""The few moments of a schedule that can be its fullest: as full as the whole of it, whatever the sizes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.schedules import make_schedule
from hpcllm.plan.memory.peak_points import PassUses, peak, points_of, schedule_points
from hpcllm.plan.memory.sizes import Use

SHAPES = [
    (name, ranks, microbatches, chunks)
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 1), ("interleaved", 2), ("gpipe", 1))
    for ranks in (1, 2, 4, 7)
    for microbatches in (1, 3, 8, 29, 56)
]


def some_uses(draw: random.Random) -> PassUses:
    """A pass that comes whole frees what its forward pass kept."""
    kept, first = draw.randrange(1, 1000), draw.randrange(-300, 300)
    use = Use(kept + draw.randrange(500), kept)
    return PassUses(use, Use(draw.randrange(900), first), Use(draw.randrange(500), -kept - first))


def walked(schedule, rank: int, chunks: list[PassUses]) -> int:
    """The peak, by adding up one action after the other, messages aside."""
    now, most, back = 0, 0, Counter()
    for action in schedule.work()[rank]:
        use = chunks[action.chunk].of(action.op)
        most = max(most, now + use.peak)
        now += -chunks[action.chunk].forward.net if action.op is Op.BACKWARD else use.net
        back[action.op] += 1
    assert now == 0
    return most


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SHAPES)
def test_peak_is_that_of_all_actions(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """For any sizes; and a schedule of few microbatches is as full as one of many."""
    draw = random.Random(f"{name} {ranks} {microbatches}")
    schedule = make_schedule(name, ranks, microbatches, chunks)
    halved = any(action.op is Op.BACKWARD_INPUT for row in schedule.actions for action in row)
    for rank in range(ranks):
        uses = [some_uses(draw) for _ in range(chunks)]
        if not halved:
            uses = [PassUses(u.forward, Use(u.backward.peak, -u.forward.net), Use(0, 0)) for u in uses]
        told = peak(points_of(schedule, rank), uses, 0)
        assert told == walked(schedule, rank, uses)
        size = draw.randrange(100)
        usual = schedule_points(name, ranks, microbatches, rank, tuple(range(chunks)))
        assert peak(usual, uses, size) == peak(points_of(schedule, rank), uses, size)
        joint = schedule_points(name, ranks, microbatches, rank, (0,) * chunks)
        assert peak(joint, uses[:1], size) == peak(usual, uses[:1] * chunks, size)


def test_1f1b_holds_as_many_as_ranks_that_follow() -> None:
    for rank in range(8):
        moments = schedule_points("1f1b", 8, 64, rank, (0,))
        assert max(moment.held[0] for moment in moments if moment.op is Op.BACKWARD) == 8 - rank
        assert len(moments) == 2  # F and B: nothing else can be the largest


def test_a_schedule_that_is_none() -> None:
    with pytest.raises(ScheduleError, match="zb-v divides"):
        schedule_points("zb-v", 4, 8, 0, (0,))
