"""Run the actions of a schedule on a clock; or bound from below, without running it, when its ranks end.

    rank 0   F0 F1 F2 .  B0 F3 B1 ...  B7 [gradients over dp][AdamW][weights over dp]
    rank 1   .  F0 B0 F1 B1 ...  B7 [gradients over dp]             a step ends when its last rank has ended

The actions are those that the engine runs (pipeline/schedules.py), the clock is that of `hpcllm schedule`. A schedule
of very many microbatches repeats itself, so it is run with fewer and continued:

    |  F0 F1 F2 ...  fill  | <- as many as ranks -> |  ...drain |        each further turn adds what that one added

This is exact once all goes in turns; with stages that differ wildly an error of parts in a thousand is left.

The bound lets a search leave layouts alone. It is the longest chain of these that is easy to name, exact for gpipe and
1F1B where stages are alike and messages take no time:

    start       a microbatch comes through all stages before this one
    own work    then all that this rank computes
    round trip  a rank of 1F1B that has done B of a microbatch begins one that comes k later, which travels to the last
                stage and back before its B: F F F . . . B B B, k = stages from here on, messages of both directions
    end         what the next rank did last has to come back

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcllm.pipeline.actions import Op, Placement
from hpcllm.plan.models import homes_of
from hpcllm.plan.numbered_work import numbered_work

MOST_PASSES = 1 << 14  # forward passes of all ranks; schedules of more are continued
TURNS = 6  # turns of as many microbatches as ranks, until the schedule repeats itself


class StageTimes(NamedTuple):
    """Seconds of the passes of a microbatch through one virtual stage, and of handing on what they made."""

    forward_s: float
    backward_s: float
    weight_s: float  # the part of backward_s that makes gradients of weights
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0


def run(
    schedule: str, ranks: int, chunks: int, microbatches: int, times: Sequence[StageTimes], blocking: bool
) -> list[float]:
    """Run the passes of one step; return when each pipeline rank has done its own. times: of each virtual stage.

    blocking: a rank does nothing else while it sends; else a message only delays who waits for it. Raises
    ScheduleError if the schedule does not exist in this shape.
    """
    few = _few(schedule, ranks, chunks, microbatches)
    ends = _run(schedule, ranks, chunks, few, times, blocking)
    if few == microbatches:
        return ends
    before, turns = _run(schedule, ranks, chunks, few - ranks, times, blocking), (microbatches - few) / ranks
    return [now + turns * (now - then) for now, then in zip(ends, before, strict=True)]


def _few(schedule: str, ranks: int, chunks: int, microbatches: int) -> int:
    """Return the number of microbatches to run with; what is left is a whole number of turns, which gpipe has not."""
    if schedule == "gpipe" or ranks * chunks * microbatches <= MOST_PASSES:
        return microbatches
    return min(microbatches, TURNS * ranks + microbatches % ranks)


def _run(
    schedule: str, ranks: int, chunks: int, microbatches: int, times: Sequence[StageTimes], blocking: bool
) -> list[float]:
    work = numbered_work(schedule, ranks, chunks, microbatches)
    each = [_durations(one, blocking) for one in times]
    durations = [each[work.placement.stage(lane.rank, lane.chunk)][lane.op] for lane in work.lanes]
    send_s = 0.0 if blocking else max(max(one.send_forward_s, one.send_backward_s) for one in times)
    return work.rank_ends(durations, send_s)


def _durations(times: StageTimes, blocking: bool) -> dict[Op, float]:
    forward_s, backward_s = (times.send_forward_s, times.send_backward_s) if blocking else (0.0, 0.0)
    return {
        Op.FORWARD: times.forward_s + forward_s,
        Op.BACKWARD: times.backward_s + backward_s,
        Op.BACKWARD_INPUT: times.backward_s - times.weight_s + backward_s,
        Op.BACKWARD_WEIGHT: times.weight_s,
    }


def earliest_ends(schedule: str, placement: Placement, microbatches: int, times: Sequence[StageTimes]) -> list[float]:
    """Bound from below the seconds at which `run` with blocking=False lets each pipeline rank end.

    times: of each virtual stage.
    """
    send_s = max(max(each.send_forward_s, each.send_backward_s) for each in set(times)) if placement.ranks > 1 else 0.0
    return BOUNDS[schedule](placement, microbatches, times, send_s)


Bound = Callable[[Placement, int, Sequence[StageTimes], float], list[float]]


def _gpipe(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Let forward passes come as fast as the slowest stage up to here allows; then the same on the way back."""
    forward = _flow([each.forward_s for each in times], 0.0, microbatches, send_s)
    backward = _flow([each.backward_s for each in reversed(times)], forward[-1], microbatches, send_s)
    return backward[: -placement.ranks - 1 : -1]


def _flow(work_s: Sequence[float], start_s: float, microbatches: int, send_s: float) -> list[float]:
    """Return when each of these stages in a row has done its work on the last microbatch."""
    ends: list[float] = []
    for own_s in work_s:
        end_s = start_s + microbatches * own_s
        ends.append(max(end_s, ends[-1] + send_s + own_s) if ends else end_s)
        start_s += own_s + send_s
    return ends


def _one_f_one_b(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    return _by_round_trips(placement, microbatches, times, send_s, [each.backward_s for each in times])


def _zb_h1(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Await only the half that makes the gradient of the input; weights' gradients come at the end."""
    halves = [each.backward_s - each.weight_s for each in times]
    awaited = _by_round_trips(placement, microbatches, times, send_s, halves)
    own = _own_work(placement, microbatches, times, send_s)
    return [max(own_s, end_s + one.weight_s) for own_s, end_s, one in zip(own, awaited, times, strict=True)]


def _by_round_trips(
    placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float, back_s: Sequence[float]
) -> list[float]:
    """Return when each rank has handed back the last microbatch.

    back_s: of each rank's backward pass, the part that the stage before it awaits.
    """
    both_s = [each.forward_s + back for each, back in zip(times, back_s, strict=True)]
    ends: list[float] = []
    trip_s = -2 * send_s
    for rank, start_s in reversed(list(enumerate(_starts(placement, times, send_s)))):
        trip_s += both_s[rank] + 2 * send_s
        trips, rest = divmod(microbatches - 1, placement.ranks - rank)
        each_s = both_s[rank] if trips else back_s[rank]  # with fewer microbatches, forward passes are all done by then
        end_s = start_s + max(microbatches * both_s[rank], trip_s * (1 + trips) + rest * each_s)
        ends.append(max(end_s, ends[-1] + send_s + back_s[rank]) if ends else end_s)
    return ends[::-1]


def _interleaved(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """End each rank's work with a backward pass of its first chunk."""
    ends: list[float] = []
    for rank, own_s in reversed(list(enumerate(_own_work(placement, microbatches, times, send_s)))):
        ends.append(max(own_s, ends[-1] + send_s + times[rank].backward_s) if ends else own_s)
    return ends[::-1]


def _own_work(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Return when each rank has done its own work, if it starts as early as it can and never waits."""
    work = [0.0] * placement.ranks
    for home, each in zip(homes_of(placement), times, strict=True):
        work[home] += each.forward_s + each.backward_s
    starts = _starts(placement, times, send_s)
    return [start_s + microbatches * work_s for start_s, work_s in zip(starts, work, strict=True)]


def _starts(placement: Placement, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Return when the first microbatch can be at each rank, which it meets in their order."""
    before = itertools.accumulate((each.forward_s + send_s for each in times), initial=0.0)
    return list(itertools.islice(before, placement.ranks))


BOUNDS: dict[str, Bound] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _own_work,
}
