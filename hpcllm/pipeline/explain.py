"""Where the time of a measured step went: what each rank computed, and why it computed nothing in the rest of the time.

The schedule is replayed several times, each time with one more thing that really happened; messages take no time. How
much longer a replay takes than the one before is what that thing cost:

    replay   what it knows                                                      the difference is called
    even     every action takes the mean time of its kind, over all stages      bubble, on top of what a rank computed
    ideal    each stage takes its own mean time                                 imbalance
    uneven   each action takes the time it took                                 uneven
    late     ranks enter the step when they did                                 late start
    busy     what a rank did between two actions, neither computing nor         engine
             waiting: posting messages, (de)compressing, Python
    (real)   the measured step                                                  exposed communication

For each rank:  measured - useful = bubble + imbalance + uneven + late start + engine + exposed communication, exactly.
Only bubble and imbalance can differ between ranks: the rank with the slowest stage idles less than it would in a
pipeline of equal stages, so its imbalance is below zero, and the others wait for it. The replays `uneven`, `late` and
`busy` start no action later than it really started, so late start, engine and exposed communication are below zero by
no more than the error of the clocks. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from hpcllm.pipeline.clock import clock, in_order, spans_of
from hpcllm.pipeline.dependencies import Event, Step
from hpcllm.pipeline.grid import Rows
from hpcllm.pipeline.measured import Measured, Wait

PARTS = ("bubble", "imbalance", "uneven", "late_start", "engine", "exposed_communication")
Times = dict[Event, float]  # of a rank's action, seconds


@dataclass(frozen=True)
class RankTime:
    """The step of one rank: useful_s + the sum of `lost_s` = the measured step."""

    useful_s: float
    lost_s: dict[str, float]  # by the names of PARTS
    entered_late_s: float  # after the first rank
    own_engine_s: float  # what this rank did between its actions; the part is what that cost the step
    waited_s: float
    longest_wait: Wait | None


@dataclass(frozen=True)
class Explanation:
    measured: Measured
    ideal: Rows  # the replay `ideal`
    ideal_s: float
    ranks: tuple[RankTime, ...]


def explain(measured: Measured) -> Explanation:
    """Divide the time of each rank into what it computed and the parts that the module's docstring defines."""
    schedule, entries, gaps = measured.schedule, measured.entries, _gaps(measured)
    order = list(in_order(schedule.placement, schedule.work()))
    real = {(rank, a): end - start for rank, row in enumerate(measured.rows) for a, start, end in row}
    even = replay(order, _means(real, lambda _, action: action.op))
    ideal = replay(order, _means(real, lambda rank, action: (action.op, rank, action.chunk)))
    late, busy = replay(order, real, entries=entries), replay(order, real, gaps, entries)
    ends_s = [*map(_end, (ideal, replay(order, real), late, busy)), measured.end]
    common_s = [later - earlier for earlier, later in pairwise(ends_s)]
    ranks = []
    for rank in range(len(entries)):
        bubble_s = _idle(even, rank)
        parts_s = [bubble_s, _idle(ideal, rank) - bubble_s, *common_s]
        ranks.append(_rank_time(measured, rank, parts_s, gaps))
    return Explanation(measured, ideal, _end(ideal), tuple(ranks))


def _rank_time(measured: Measured, rank: int, parts_s: Sequence[float], gaps: Times) -> RankTime:
    row, waits = measured.rows[rank], measured.waits[rank]
    return RankTime(
        useful_s=sum(end - start for _, start, end in row),
        lost_s=dict(zip(PARTS, parts_s, strict=True)),
        entered_late_s=measured.entries[rank],
        own_engine_s=sum(gaps[rank, action] for action, _, _ in row),
        waited_s=_waited(waits)(math.inf),
        longest_wait=max(waits, key=lambda wait: wait[2] - wait[1], default=None),
    )


def replay(
    order: Sequence[Step], times: Times, gaps: Mapping[Event, float] | None = None, entries: Sequence[float] = ()
) -> Rows:
    """When each action would run if messages took no time.

    order: clock.in_order's; times: how long each action takes; gaps: how long its rank is busy with something else
    before it; entries: when each rank enters the step, else at 0.
    """
    pauses = gaps or defaultdict(float)
    done = clock(order, lambda *event: times[event], pause=lambda *event: pauses[event], entries=entries)
    return spans_of(done, 1 + max(rank for rank, _, _ in order))


def _means(real: Times, kind: Callable[..., object]) -> Times:
    """For each action the mean of all of its kind."""
    kinds = defaultdict[object, list[float]](list)
    for event, time_s in real.items():
        kinds[kind(*event)].append(time_s)
    means = {name: fmean(times_s) for name, times_s in kinds.items()}
    return {event: means[kind(*event)] for event in real}


def _gaps(measured: Measured) -> Times:
    """How long a rank neither computed nor waited before each action, since the action before."""
    gaps = {}
    for rank, (row, waits, free) in enumerate(zip(measured.rows, measured.waits, measured.entries, strict=True)):
        waited = _waited(waits)
        for action, start, end in row:
            gaps[rank, action] = max(0.0, start - free - (waited(start) - waited(free)))
            free = end
    return gaps


def _waited(waits: Sequence[Wait]) -> Callable[[float], float]:
    """How long a rank had waited by some time; what two waits share counts once."""
    apart: list[tuple[float, float]] = []
    for _, start, end in waits:
        first = max(start, apart[-1][1]) if apart else start
        if end > first:
            apart.append((first, end))
    starts = [start for start, _ in apart]
    sums = [0.0, *accumulate(end - start for start, end in apart)]

    def until(time: float) -> float:
        k = bisect_right(starts, time)
        return sums[k] - max(0.0, apart[k - 1][1] - time) if k else 0.0

    return until


def _idle(rows: Rows, rank: int) -> float:
    return _end(rows) - sum(end - start for _, start, end in rows[rank])


def _end(rows: Rows) -> float:
    return max(end for row in rows for _, _, end in row)
