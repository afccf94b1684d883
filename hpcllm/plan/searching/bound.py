"""How long the passes of a schedule take at least, without running it: what lets a search leave layouts alone.

    start       a microbatch comes through all stages before this one
    own work    then all that this rank computes
    the way     a rank of 1F1B that has done B of a microbatch begins one that comes k later, which travels to the last
                stage and back before its B: F F F . . . B B B, k = stages from here on, messages of both directions
    end         what the next rank did last has to come back

        rank 0   F0 F1 F2 .  .  B0 F3 B1 ...                B7        the longest chain of these that is easy to name
        rank 1   .  F0 F1 .  B0 F2 B1 ...          B6 B7
        rank 2   .  .  F0 B0 F1 B1 ...       B7

Exact for gpipe and 1F1B where stages are alike and messages take no time. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from hpcllm.pipeline.placement import Placement
from hpcllm.plan.time.timeline import StageTimes


def ends_at_least(schedule: str, placement: Placement, microbatches: int, times: Sequence[StageTimes]) -> list[float]:
    """Seconds of each pipeline rank, as timeline.run takes them with blocking False. times: of each virtual stage."""
    send_s = max(max(each.send_forward_s, each.send_backward_s) for each in times) if placement.ranks > 1 else 0.0
    return BOUNDS[schedule](placement, microbatches, times, send_s)


Bound = Callable[[Placement, int, Sequence[StageTimes], float], list[float]]


def _gpipe(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Forward passes as fast as the slowest stage up to here lets them come; then the same on the way back."""
    forward = _flow([each.forward_s for each in times], 0.0, microbatches, send_s)
    backward = _flow([each.backward_s for each in reversed(times)], forward[-1], microbatches, send_s)
    return backward[: -placement.ranks - 1 : -1]


def _flow(work_s: Sequence[float], start_s: float, microbatches: int, send_s: float) -> list[float]:
    """When each of these stages in a row has done its work on the last microbatch."""
    ends: list[float] = []
    for own_s in work_s:
        end_s = start_s + microbatches * own_s
        ends.append(max(end_s, ends[-1] + send_s + own_s) if ends else end_s)
        start_s += own_s + send_s
    return ends


def _one_f_one_b(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    return _by_way(placement, microbatches, times, send_s, [each.backward_s for each in times])


def _zb_h1(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """Only the half that makes the gradient of the input is awaited; weights' gradients come at the end."""
    halves = [each.backward_s - each.weight_s for each in times]
    awaited = _by_way(placement, microbatches, times, send_s, halves)
    own = _own(placement, microbatches, times, send_s)
    return [max(own_s, end_s + one.weight_s) for own_s, end_s, one in zip(own, awaited, times, strict=True)]


def _by_way(
    placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float, back_s: Sequence[float]
) -> list[float]:
    """When each rank has handed back the last microbatch. back_s: of its pass back that the stage before awaits."""
    both_s = [each.forward_s + back for each, back in zip(times, back_s, strict=True)]
    ends: list[float] = []
    way_s = -2 * send_s
    for rank, start_s in reversed(list(enumerate(_starts(placement, times, send_s)))):
        way_s += both_s[rank] + 2 * send_s
        ways, rest = divmod(microbatches - 1, placement.ranks - rank)
        each_s = both_s[rank] if ways else back_s[rank]  # with fewer microbatches, forward passes are all done by then
        end_s = start_s + max(microbatches * both_s[rank], way_s * (1 + ways) + rest * each_s)
        ends.append(max(end_s, ends[-1] + send_s + back_s[rank]) if ends else end_s)
    return ends[::-1]


def _interleaved(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """The last of each rank's work is a backward pass of its first chunk."""
    ends: list[float] = []
    for rank, own_s in reversed(list(enumerate(_own(placement, microbatches, times, send_s)))):
        ends.append(max(own_s, ends[-1] + send_s + times[rank].backward_s) if ends else own_s)
    return ends[::-1]


def _own(placement: Placement, microbatches: int, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """When each rank has done its own work, if it starts as early as it can and never waits."""
    work = [0.0] * placement.ranks
    for stage, each in enumerate(times):
        work[placement.home(stage)[0]] += each.forward_s + each.backward_s
    starts = _starts(placement, times, send_s)
    return [start_s + microbatches * work_s for start_s, work_s in zip(starts, work, strict=True)]


def _starts(placement: Placement, times: Sequence[StageTimes], send_s: float) -> list[float]:
    """When the first microbatch can be at each rank, which it meets in their order."""
    before = itertools.accumulate((each.forward_s + send_s for each in times), initial=0.0)
    return list(itertools.islice(before, placement.ranks))


BOUNDS: dict[str, Bound] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _own,
}
