"""A measured step for people and as JSON: measured over ideal, then where the time of each rank went.

        0         5         10
rank 0  F0-- F1-- ....B0------            measured
rank 0  F0-- F1-- ..B0------              ideal: what explain.py calls so
rank    computed   bubble   imbalance   ...                    the parts of a row add up to the measured step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcllm.pipeline.explain import PARTS, Explanation, RankTime
from hpcllm.pipeline.picture import Panel
from hpcllm.pipeline.report import fit, grid_lines, legend, title
from hpcllm.pipeline.table import percent, table
from hpcllm.printable import printable

WORDS = {
    "bubble": "what the schedule idles if all stages are equally fast",
    "imbalance": "more (or, on the slowest rank, less) idling because stages are not equally fast",
    "uneven": "longer (or shorter) because one microbatch took longer than another on the same stage",
    "late_start": "longer because a rank entered the step late",
    "engine": "longer because ranks did something else between actions: posting, (de)compressing, Python",
    "exposed_communication": "the rest: waiting for messages that were on their way, clock error included",
}
MOST_WAITS = 3


def lines(explanations: Sequence[Explanation], columns: int) -> list[str]:
    """The slowest replica's step, drawn and explained."""
    it = slowest(explanations)
    measured, unit = it.measured, "ms"
    together = [_ms(measured.rows), _ms(it.ideal)]
    grid = fit(together, columns)
    return [
        f"{title(measured.schedule)}; step {measured.step}{_which(explanations, it)}",
        "",
        f"measured: {1e3 * measured.end:.2f} ms",
        *grid_lines(grid, together[0], 1e3 * measured.end, unit),
        "",
        f"ideal: {1e3 * it.ideal_s:.2f} ms, with the mean time of each stage and messages that take none",
        *grid_lines(grid, together[1], 1e3 * it.ideal_s, unit),
        *legend(grid, measured.rows),
        "",
        f"measured / ideal = {measured.end / it.ideal_s:.3f}; the step of each rank in ms, the parts add up to it:",
        *table(["rank", "computed", *(_name(part) for part in PARTS), "step"], _parts_rows(it)),
        *(f"  {_name(part)}: {words}" for part, words in WORDS.items()),
        "",
        "who it was, ms:",
        *table(["rank", "entered late", "waited", "engine's own work"], _rank_rows(it)),
        *_longest_waits(it),
        f"  clocks of two ranks differ by at most {1e3 * measured.clock_error_s:.3f} ms",
    ]


def as_dict(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """For --json: every replica; seconds."""
    measured = explanations[0].measured
    return {
        **measured.schedule.shape(),
        "step": measured.step,
        "clock_error_s": measured.clock_error_s,
        "replicas": [_replica_dict(explanation) for explanation in explanations],
    }


def panels(explanations: Sequence[Explanation]) -> list[Panel]:
    """For a picture: measured above ideal, in ms."""
    it = slowest(explanations)
    name, end_s = title(it.measured.schedule), it.measured.end
    waits = [[(1e3 * start, 1e3 * end) for _, start, end in row] for row in it.measured.waits]
    above = f"measured, step {it.measured.step} of {name}: {1e3 * end_s:.2f} ms"
    return [
        Panel(above, _ms(it.measured.rows), 1e3 * end_s, _idle(it, end_s), waits),
        Panel(f"ideal: {1e3 * it.ideal_s:.2f} ms", _ms(it.ideal), 1e3 * it.ideal_s, _idle(it, it.ideal_s)),
    ]


def slowest(explanations: Sequence[Explanation]) -> Explanation:
    return max(explanations, key=lambda explanation: explanation.measured.end)


def _idle(it: Explanation, end_s: float) -> tuple[str, ...]:
    return tuple(f"idle {percent(1 - rank.useful_s / end_s)}" for rank in it.ranks)


def _ms(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[(what, 1e3 * start, 1e3 * end) for what, start, end in row] for row in rows]


def _which(explanations: Sequence[Explanation], it: Explanation) -> str:
    if len(explanations) == 1:
        return ""
    return f", replica {it.measured.replica}, the slowest of {len(explanations)}"


def _name(part: str) -> str:
    return part.replace("_", " ")


def _parts_rows(it: Explanation) -> list[list[str]]:
    return [
        [str(rank), *(_in_ms(time_s) for time_s in (time.useful_s, *time.lost_s.values(), it.measured.end))]
        for rank, time in enumerate(it.ranks)
    ]


def _rank_rows(it: Explanation) -> list[list[str]]:
    return [
        [str(rank), *map(_in_ms, (time.entered_late_s, time.waited_s, time.own_engine_s))]
        for rank, time in enumerate(it.ranks)
    ]


def _longest_waits(it: Explanation) -> list[str]:
    waits = [(rank, time.longest_wait) for rank, time in enumerate(it.ranks) if time.longest_wait]
    waits.sort(key=lambda wait: wait[1][1] - wait[1][2])
    return [
        f"  rank {rank} waited {_in_ms(end - start)} ms, from {_in_ms(start)} ms on, for {printable(what)}"
        for rank, (what, start, end) in waits[:MOST_WAITS]
    ]


def _in_ms(time_s: float) -> str:
    return f"{1e3 * time_s:.2f}"


def _replica_dict(it: Explanation) -> dict[str, Any]:
    return {
        "replica": it.measured.replica,
        "step_s": it.measured.end,
        "ideal_s": it.ideal_s,
        "per_rank": [_rank_dict(rank, time) for rank, time in enumerate(it.ranks)],
    }


def _rank_dict(rank: int, time: RankTime) -> dict[str, Any]:
    wait = time.longest_wait
    return {
        "rank": rank,
        "useful_s": time.useful_s,
        **{f"{part}_s": time_s for part, time_s in time.lost_s.items()},
        "entered_late_s": time.entered_late_s,
        "own_engine_s": time.own_engine_s,
        "waited_s": time.waited_s,
        "longest_wait": wait and {"for": wait[0], "start_s": wait[1], "end_s": wait[2]},
    }
