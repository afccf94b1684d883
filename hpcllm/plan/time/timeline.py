"""One step as a run of its schedule's actions, event by event.

    rank 0   F0 F1 F2 .  B0 F3 B1 ...  B7 [gradients over dp][AdamW][weights over dp]
    rank 1   .  F0 B0 F1 B1 ...  B7 [gradients over dp]             a step ends when its last rank has ended

The actions are those that the engine runs (pipeline/schedules.py), the clock is that of `hpcllm schedule`. A schedule
of very many microbatches repeats itself, so it is run with fewer and continued:

    |  F0 F1 F2 ...  fill  | <- as many as ranks -> |  ...drain |        each further turn adds what that one added

Which is exact once all goes in turns; with stages that differ wildly an error of parts in a thousand is left. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.clock import clock, in_order
from hpcllm.pipeline.dependencies import Step
from hpcllm.pipeline.placement import Placement
from hpcllm.pipeline.schedules import make_work

NO_TURNS = ("gpipe",)  # all forward passes come first: there is nothing that repeats itself
MOST_PASSES = 1 << 14  # forward passes of all ranks; schedules of more are continued
TURNS = 6  # of as many microbatches as ranks, until all goes in turns


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the passes of a microbatch through one virtual stage, and of handing on what they made."""

    forward_s: float
    backward_s: float
    weight_s: float  # the part of backward_s that makes gradients of weights
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0


@dataclass(frozen=True)
class Finish:
    """When each pipeline rank has done its passes, and how long it worked until then, messages included if blocking."""

    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    def further(self, before: Finish, turns: float) -> Finish:
        """After so many more turns, each of which adds what the last one added to `before`."""
        pairs = ((self.end_s, before.end_s), (self.busy_s, before.busy_s))
        return Finish(*(tuple(b + turns * (b - a) for b, a in zip(now, then, strict=True)) for now, then in pairs))


def run(
    schedule: str, ranks: int, chunks: int, microbatches: int, times: Sequence[StageTimes], blocking: bool
) -> Finish:
    """The passes of one step. times: of each virtual stage, ranks x chunks.

    blocking: a rank does nothing else while it sends; else a message only delays who waits for it. Raises
    ScheduleError if the schedule does not exist in this shape.
    """
    few = _few(schedule, ranks, chunks, microbatches)
    finish = _run(schedule, ranks, chunks, few, times, blocking)
    if few == microbatches:
        return finish
    return finish.further(_run(schedule, ranks, chunks, few - ranks, times, blocking), (microbatches - few) / ranks)


def _few(schedule: str, ranks: int, chunks: int, microbatches: int) -> int:
    """Microbatches to run with; what is left is a whole number of turns."""
    if schedule in NO_TURNS or ranks * chunks * microbatches <= MOST_PASSES:
        return microbatches
    return min(microbatches, TURNS * ranks + microbatches % ranks)


@lru_cache(maxsize=32)
def work_in_order(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[Placement, tuple[Step, ...]]:
    """All passes, none before its input."""
    placement, work = make_work(schedule, ranks, microbatches, chunks)
    return placement, tuple(in_order(placement, work))


def _run(
    schedule: str, ranks: int, chunks: int, microbatches: int, times: Sequence[StageTimes], blocking: bool
) -> Finish:
    placement, order = work_in_order(schedule, ranks, chunks, microbatches)
    durations = {placement.home(stage): _durations(each, blocking) for stage, each in enumerate(times)}
    send_s = 0.0 if blocking else max(max(each.send_forward_s, each.send_backward_s) for each in times)
    end, busy = [0.0] * ranks, [0.0] * ranks
    for done in clock(order, lambda rank, action: durations[rank, action.chunk][action.op], send_s):
        end[done.rank] = done.end
        busy[done.rank] += done.end - done.start
    return Finish(tuple(end), tuple(busy))


def _durations(times: StageTimes, blocking: bool) -> dict[Op, float]:
    there, back = (times.send_forward_s, times.send_backward_s) if blocking else (0.0, 0.0)
    return {
        Op.FORWARD: times.forward_s + there,
        Op.BACKWARD: times.backward_s + back,
        Op.BACKWARD_INPUT: times.backward_s - times.weight_s + back,
        Op.BACKWARD_WEIGHT: times.weight_s,
    }
