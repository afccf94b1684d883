"""The time of a step's passes is that of its schedule's actions, and of closed forms where there are some."""

from __future__ import annotations

import random

import pytest

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.schedules import make_schedule
from hpcllm.pipeline.timing import Times, simulate
from hpcllm.plan.time import timeline
from hpcllm.plan.time.timeline import StageTimes, run

SHAPES = [
    ("gpipe", 3, 1, 7),
    ("1f1b", 1, 1, 4),
    ("1f1b", 4, 1, 9),
    ("1f1b", 5, 1, 3),
    ("interleaved", 3, 2, 9),
    ("interleaved", 4, 3, 8),
    ("zb-h1", 4, 1, 10),
    ("zb-v", 3, 2, 8),
]


def some_times(stages: int, seed: int, spread: float = 1.0) -> list[StageTimes]:
    draw = random.Random(seed).random

    def one() -> StageTimes:
        forward_s = 1 + spread * draw()
        return StageTimes(forward_s, 2 * forward_s + spread * draw(), forward_s, 0.1, 0.1)

    return [one() for _ in range(stages)]


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), SHAPES)
def test_without_blocking_it_is_what_the_schedule_command_says(name, ranks, chunks, microbatches):
    times = some_times(ranks * chunks, seed=ranks)
    forward, backward, weight = (
        tuple(getattr(each, key) for each in times) for key in ("forward_s", "backward_s", "weight_s")
    )
    told = simulate(
        make_schedule(name, ranks, microbatches, chunks),
        Times(forward=forward, backward=backward, weight=weight, send=0.1),
    )
    found = run(name, ranks, chunks, microbatches, times, blocking=False)
    assert found == pytest.approx([of_rank[-1][2] for of_rank in told.spans])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 21])
def test_alike_stages_take_what_the_closed_forms_say(ranks, microbatches):
    """arXiv:2104.04473 section 2.2: m + p - 1 turns; with v chunks the bubble is a v-th."""
    alike = [StageTimes(1.0, 2.0, 1.0)] * ranks
    for name in ("gpipe", "1f1b"):
        assert max(run(name, ranks, 1, microbatches, alike, True)) == pytest.approx(3 * (microbatches + ranks - 1))
    for chunks in (2, 4):
        if microbatches % ranks == 0:
            each = [StageTimes(1.0 / chunks, 2.0 / chunks, 1.0 / chunks)] * ranks * chunks
            found = max(run("interleaved", ranks, chunks, microbatches, each, True))
            assert found == pytest.approx(3 * microbatches + 3 * (ranks - 1) / chunks)


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), SHAPES)
def test_messages_that_block_cost_both_ends_more_than_those_that_do_not(name, ranks, chunks, microbatches):
    times = some_times(ranks * chunks, seed=1)
    free = [StageTimes(each.forward_s, each.backward_s, each.weight_s) for each in times]
    ends = [max(run(name, ranks, chunks, microbatches, *how)) for how in ((free, True), (times, False), (times, True))]
    assert ends[0] <= ends[1] + 1e-9
    assert ends[0] <= ends[2] + 1e-9
    if ranks == 1:
        assert microbatches * sum(each.forward_s + each.backward_s for each in free) == pytest.approx(ends[0])


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("1f1b", 4, 1), ("1f1b", 8, 1), ("interleaved", 4, 2), ("zb-h1", 6, 1), ("zb-v", 4, 2)],
)
@pytest.mark.parametrize("spread", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_long_schedule_is_continued_nearly_as_it_would_run(monkeypatch, name, ranks, chunks, spread, blocking):
    times = some_times(ranks * chunks, seed=ranks, spread=spread)
    for microbatches in (16 * ranks, 20 * ranks + (0 if name == "interleaved" else 1)):
        whole = run(name, ranks, chunks, microbatches, times, blocking)
        monkeypatch.setattr(timeline, "MOST_PASSES", 0)
        short = run(name, ranks, chunks, microbatches, times, blocking)
        monkeypatch.undo()
        assert short == pytest.approx(whole, rel=0.02 * spread + 1e-9)


def test_a_faster_stage_never_makes_a_step_slower():
    for seed in range(20):
        times = some_times(4, seed)
        faster = [*times[:2], StageTimes(0.5, 1.0, 0.5, 0.1, 0.1), *times[3:]]
        for blocking in (True, False):
            slow, fast = (max(run("1f1b", 4, 1, 9, each, blocking)) for each in (times, faster))
            assert fast <= slow + 1e-9


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(ScheduleError):
        run("1f1b", 4, 2, 6, [StageTimes(1, 2, 1)] * 8, True)
