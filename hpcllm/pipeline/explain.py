"""Explain where the time of a measured step went: what each rank computed, and why it idled in the rest.

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

The report shows the slowest replica, measured over ideal:

            0         5         10
    rank 0  F0-- F1-- ....B0------            measured
    rank 0  F0-- F1-- ..B0------              ideal
    rank    computed   bubble   imbalance ... the parts of a row add up to the measured step
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from hpcllm.pipeline.clock import Event, Step, clock, in_order, spans_of
from hpcllm.pipeline.grid import Rows, fit_labelled, legend_lines, timeline_lines
from hpcllm.pipeline.measured import Measured, Wait
from hpcllm.pipeline.picture import Panel
from hpcllm.system.text import percent, printable, table

PARTS = {  # part of the lost time -> its meaning
    "bubble": "what the schedule idles if all stages are equally fast",
    "imbalance": "more (or, on the slowest rank, less) idling because stages are not equally fast",
    "uneven": "longer (or shorter) because one microbatch took longer than another on the same stage",
    "late_start": "longer because a rank entered the step late",
    "engine": "longer because ranks did something else between actions: posting, (de)compressing, Python",
    "exposed_communication": "the rest: waiting for messages that were on their way, clock error included",
}
MOST_WAITS = 3  # waits that the report names
Times = dict[Event, float]  # seconds that a rank's action takes


@dataclass(frozen=True)
class RankTime:
    """Times of one rank in the step: useful_s + the sum of `lost_s` = the measured step."""

    useful_s: float
    lost_s: dict[str, float]  # by the names of PARTS
    entered_late_s: float  # after the first rank
    own_engine_s: float  # this rank's work between its actions; the part `engine` is what that cost the step
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
    for rank, (row, waits) in enumerate(zip(measured.rows, measured.waits, strict=True)):
        bubble_s = _idle(even, rank)
        parts_s = [bubble_s, _idle(ideal, rank) - bubble_s, *common_s]
        time = RankTime(
            useful_s=sum(end - start for _, start, end in row),
            lost_s=dict(zip(PARTS, parts_s, strict=True)),
            entered_late_s=entries[rank],
            own_engine_s=sum(gaps[rank, action] for action, _, _ in row),
            waited_s=_waited(waits)(math.inf),
            longest_wait=max(waits, key=lambda wait: wait[2] - wait[1], default=None),
        )
        ranks.append(time)
    return Explanation(measured, ideal, _end(ideal), tuple(ranks))


def replay(
    order: Sequence[Step], times: Times, gaps: Mapping[Event, float] | None = None, entries: Sequence[float] = ()
) -> Rows:
    """Find when each action would run if messages took no time.

    order: from clock.in_order; times: how long each action takes; gaps: how long its rank is busy with something else
    before it; entries: when each rank enters the step, else at 0.
    """
    pauses = gaps or defaultdict(float)
    done = clock(order, lambda *event: times[event], pause=lambda *event: pauses[event], entries=entries)
    return spans_of(done, 1 + max(rank for rank, _, _ in order))


def _means(real: Times, kind: Callable[..., object]) -> Times:
    """Replace each time by the mean of all actions of its kind."""
    kinds = defaultdict[object, list[float]](list)
    for event, time_s in real.items():
        kinds[kind(*event)].append(time_s)
    means = {name: fmean(times_s) for name, times_s in kinds.items()}
    return {event: means[kind(*event)] for event in real}


def _gaps(measured: Measured) -> Times:
    """Seconds in which a rank neither computed nor waited before each action, since the action before."""
    gaps = {}
    for rank, (row, waits, free) in enumerate(zip(measured.rows, measured.waits, measured.entries, strict=True)):
        waited = _waited(waits)
        for action, start, end in row:
            gaps[rank, action] = max(0.0, start - free - (waited(start) - waited(free)))
            free = end
    return gaps


def _waited(waits: Sequence[Wait]) -> Callable[[float], float]:
    """Return a function from a time to how long the rank had waited by then; what two waits share counts once."""
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


def explanation_lines(explanations: Sequence[Explanation], columns: int) -> list[str]:
    """The report: the slowest replica's step, drawn and explained."""
    it = _slowest(explanations)
    measured, rows, ideal = it.measured, _ms(it.measured.rows), _ms(it.ideal)
    grid = fit_labelled([rows, ideal], columns)
    which = f", replica {measured.replica}, the slowest of {len(explanations)}" if len(explanations) > 1 else ""
    parts = [(time.useful_s, *time.lost_s.values(), measured.end) for time in it.ranks]
    others = [(time.entered_late_s, time.waited_s, time.own_engine_s) for time in it.ranks]
    return [
        f"{measured.schedule.title()}; step {measured.step}{which}",
        "",
        f"measured: {1e3 * measured.end:.2f} ms",
        *timeline_lines(grid, rows, 1e3 * measured.end, "ms"),
        "",
        f"ideal: {1e3 * it.ideal_s:.2f} ms, with the mean time of each stage and messages that take none",
        *timeline_lines(grid, ideal, 1e3 * it.ideal_s, "ms"),
        *legend_lines(grid, measured.rows),
        "",
        f"measured / ideal = {measured.end / it.ideal_s:.3f}; the step of each rank in ms, the parts add up to it:",
        *_rank_table(["computed", *(_name(part) for part in PARTS), "step"], parts),
        *(f"  {_name(part)}: {words}" for part, words in PARTS.items()),
        "",
        "who it was, ms:",
        *_rank_table(["entered late", "waited", "engine's own work"], others),
        *_longest_waits(it),
        f"  clocks of two ranks differ by at most {1e3 * measured.clock_error_s:.3f} ms",
    ]


def explanation_facts(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """Numbers of every replica for --json, in seconds."""
    measured = explanations[0].measured
    replicas = [
        {
            "replica": it.measured.replica,
            "step_s": it.measured.end,
            "ideal_s": it.ideal_s,
            "per_rank": [{"rank": rank, **_rank_facts(time)} for rank, time in enumerate(it.ranks)],
        }
        for it in explanations
    ]
    about = {"step": measured.step, "clock_error_s": measured.clock_error_s}
    return {**measured.schedule.shape(), **about, "replicas": replicas}


def explanation_panels(explanations: Sequence[Explanation]) -> list[Panel]:
    """The slowest replica for a picture: measured above ideal, in ms."""
    it = _slowest(explanations)
    end_s = it.measured.end
    waits = [[(1e3 * start, 1e3 * end) for _, start, end in row] for row in it.measured.waits]
    above = f"measured, step {it.measured.step} of {it.measured.schedule.title()}: {1e3 * end_s:.2f} ms"
    return [
        Panel(above, _ms(it.measured.rows), 1e3 * end_s, _idle_texts(it, end_s), waits),
        Panel(f"ideal: {1e3 * it.ideal_s:.2f} ms", _ms(it.ideal), 1e3 * it.ideal_s, _idle_texts(it, it.ideal_s)),
    ]


def _slowest(explanations: Sequence[Explanation]) -> Explanation:
    return max(explanations, key=lambda explanation: explanation.measured.end)


def _idle_texts(it: Explanation, end_s: float) -> tuple[str, ...]:
    return tuple(f"idle {percent(1 - rank.useful_s / end_s)}" for rank in it.ranks)


def _ms(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[(what, 1e3 * start, 1e3 * end) for what, start, end in row] for row in rows]


def _name(part: str) -> str:
    return part.replace("_", " ")


def _in_ms(time_s: float) -> str:
    return f"{1e3 * time_s:.2f}"


def _rank_table(head: Sequence[str], times_s: Sequence[Sequence[float]]) -> list[str]:
    return table(["rank", *head], [[str(rank), *map(_in_ms, row)] for rank, row in enumerate(times_s)])


def _longest_waits(it: Explanation) -> list[str]:
    waits = [(rank, time.longest_wait) for rank, time in enumerate(it.ranks) if time.longest_wait]
    waits.sort(key=lambda wait: wait[1][1] - wait[1][2])
    return [
        f"  rank {rank} waited {_in_ms(end - start)} ms, from {_in_ms(start)} ms on, for {printable(what)}"
        for rank, (what, start, end) in waits[:MOST_WAITS]
    ]


def _rank_facts(time: RankTime) -> dict[str, Any]:
    wait = time.longest_wait
    return {
        "useful_s": time.useful_s,
        **{f"{part}_s": time_s for part, time_s in time.lost_s.items()},
        **{name: getattr(time, name) for name in ("entered_late_s", "own_engine_s", "waited_s")},
        "longest_wait": wait and {"for": wait[0], "start_s": wait[1], "end_s": wait[2]},
    }
