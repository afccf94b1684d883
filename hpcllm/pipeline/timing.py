"""Duration of a schedule, the share of it in which each rank idles, and the activations that it holds. Pure.

F=1 B=2:  rank 0   F0 F1 .  B0 -- .  B1 --        makespan 9, idle share 3/9 on both ranks,
          rank 1   .  F0 B0 -- F1 B1 -- ...       peak live activations 2 and 1, 2 messages from each
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.clock import Span, clock, in_order, spans_of
from hpcllm.pipeline.schedules import Schedule

Each = float | tuple[float, ...]  # one number for a rank's whole part of the model, or one for each virtual stage
LIVE = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}  # change of the number of activations held


def _numbers(each: Each) -> tuple[float, ...]:
    return each if isinstance(each, tuple) else (each,)


@dataclass(frozen=True)
class Times:
    """Durations of the passes of one microbatch, in any one unit. Raises ScheduleError.

    One number is for a rank's whole part of the model, of which a chunk takes its share; a tuple has the durations of
    all virtual stages, as they are.
    """

    forward: Each = 1.0
    backward: Each = 2.0  # the whole backward pass
    weight: Each = 1.0  # its half W; the other half, I, is what is left
    send: float = 0.0  # from the end of an action to when what it made is on another rank
    recompute: bool = False  # B and I do the forward pass once more

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "send"):
            for value in _numbers(getattr(self, name)):
                if not 0 <= value < math.inf:
                    raise ScheduleError(f"{name} = {value} is no duration; it has to be 0 or more, and finite")
        backwards, weights = _numbers(self.backward), _numbers(self.weight)
        if len(backwards) != len(weights):
            counts = f"{len(backwards)} durations of backward and {len(weights)} of its part weight"
            raise ScheduleError(f"{counts}; both have to be of all virtual stages, or both one number")
        for backward, weight in zip(backwards, weights, strict=True):
            if weight > backward:
                raise ScheduleError(f"weight = {weight} is a part of backward = {backward}; it can be that at most")

    def durations(self, stage: int, placement: Placement) -> dict[Op, float]:
        """Duration of each compute action of a virtual stage."""
        forward, backward, weight = (
            each[stage] if isinstance(each, tuple) else each / placement.chunks
            for each in (self.forward, self.backward, self.weight)
        )
        again = forward if self.recompute else 0
        return {
            Op.FORWARD: forward,
            Op.BACKWARD: backward + again,
            Op.BACKWARD_INPUT: backward - weight + again,
            Op.BACKWARD_WEIGHT: weight,
        }


USUAL = Times()  # roughly those of a transformer


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, and their numbers. The tuples go by rank."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # compute actions with start and end
    makespan: float
    idle_share: tuple[float, ...]  # of the makespan
    peak_live: tuple[int, ...]  # activations held at once, each of one microbatch and one chunk
    messages: tuple[int, ...]  # sent

    @property
    def bubble(self) -> float:
        """Idle share of all ranks together."""
        return sum(self.idle_share) / len(self.idle_share)


def simulate(schedule: Schedule, times: Times = USUAL) -> Timeline:
    """Simulate the timeline by `times`: an action starts when its rank is free and its input is there.

    Raises ScheduleError if the schedule cannot run to its end, or if times of virtual stages are not of all of them.
    """
    placement = schedule.placement
    for each in (times.forward, times.backward, times.weight):
        if isinstance(each, tuple) and len(each) != placement.stages:
            raise ScheduleError(f"{len(each)} durations, but the schedule has {placement.stages} virtual stages")
    durations = {placement.home(stage): times.durations(stage, placement) for stage in range(placement.stages)}
    order = in_order(placement, schedule.work())
    done = clock(order, lambda rank, action: durations[rank, action.chunk][action.op], times.send)
    spans = spans_of(done, len(schedule.actions))
    makespan = max((row[-1][2] for row in spans if row), default=0.0)
    busy = [sum(end - start for _, start, end in row) for row in spans]
    return Timeline(
        schedule=schedule,
        spans=tuple(map(tuple, spans)),
        makespan=makespan,
        idle_share=tuple((makespan - time) / makespan if makespan else 0.0 for time in busy),
        peak_live=tuple(map(peak_live, schedule.actions)),
        messages=tuple(sum(a.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD) for a in row) for row in schedule.actions),
    )


def peak_live(actions: Sequence[Action]) -> int:
    """Most activations that a rank holds at once: each from its F to its B or W."""
    return max(itertools.accumulate((LIVE.get(action.op, 0) for action in actions), initial=0))
