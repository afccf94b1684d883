"""What one schedule is worth, for people and as JSON: what was proved, the grid, and the numbers of each rank.

proved: no deadlock, ...
        0         10                          rank     idle   peak live   messages
rank 0  F0 F1 .  B0--- ...                    0      27.3 %           4          8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.clock import Span
from hpcllm.pipeline.grid import Grid, Rows
from hpcllm.pipeline.grid import fit as fit_grid
from hpcllm.pipeline.picture import Panel
from hpcllm.pipeline.schedules import Schedule
from hpcllm.pipeline.table import bytes_text, percent, table
from hpcllm.pipeline.timing import Timeline, Times

NARROWEST = 20  # columns of a grid, however narrow the terminal
MEANINGS = {
    Op.FORWARD: "forward pass of a microbatch",
    Op.BACKWARD: "its backward pass",
    Op.BACKWARD_INPUT: "its backward pass for the input only: the rank before waits for this gradient",
    Op.BACKWARD_WEIGHT: "the rest of its backward pass, for the weights: nobody waits for it, so it fills gaps",
}


def proved(timeline: Timeline) -> list[str]:
    """What `check` has shown, in sentences."""
    schedule, messages = timeline.schedule, sum(timeline.messages)
    once = (
        f"each of {schedule.microbatches} microbatches goes forward and backward through "
        f"{schedule.placement.stages} stages, once, in a possible order"
    )
    told = f"each of {messages} messages is sent once and received once, and none can be taken for another"
    alive = "no deadlock, even if every send blocks until its receive is posted"
    return [once, *[told] * (messages > 0), alive]


def lines(timeline: Timeline, times: Times, columns: int, message_bytes: int | None) -> list[str]:
    """The whole report."""
    spans, grid = timeline.spans, fit([timeline.spans], columns)
    return [
        title(timeline.schedule),
        times_text(times),
        *(f"proved: {line}" for line in proved(timeline)),
        "",
        *grid_lines(grid, spans, timeline.makespan, "ticks"),
        *legend(grid, spans),
        "",
        f"a step takes {timeline.makespan:.6g} ticks; the bubble is {percent(timeline.bubble)} of the ranks' time",
        *_rank_table(timeline, message_bytes),
        *_words(timeline.schedule, message_bytes),
    ]


def title(schedule: Schedule) -> str:
    """Name and shape."""
    placement = schedule.placement
    chunks = f" of {placement.chunks} chunks ({placement.kind})" if placement.chunks > 1 else ""
    return f"{schedule.name}: {placement.ranks} ranks{chunks}, {schedule.microbatches} microbatches"


def times_text(times: Times) -> str:
    again = "; B and I do F again (recomputation)" if times.recompute else ""
    return (
        f"ticks for a rank's part of the model: F={times.forward:g} B={times.backward:g}, of which W={times.weight:g}; "
        f"a message {times.send:g}{again}"
    )


def fit(together: Sequence[Rows], columns: int) -> Grid:
    """The grid in which all timelines that are to be read together fit the columns."""
    return fit_grid(together, max(columns - _margin(together[0]), NARROWEST))


def grid_lines(grid: Grid, rows: Rows, until: float, unit: str) -> list[str]:
    """One timeline as text."""
    margin = _margin(rows)
    ranks = [f"{f'rank {rank}':<{margin}}{grid.row(row, until)}" for rank, row in enumerate(rows)]
    return [f"{'':<{margin}}{grid.axis(until)}", *ranks, f"{'':<{margin}}({grid.note(unit, until)})"]


def legend(grid: Grid, rows: Rows) -> list[str]:
    """What stands in a grid, of what is there."""
    actions = {action for row in rows for action, _, _ in row}
    number, chunk = ("3", "F3.1") if grid.named else ("", "")
    names = [f"{op + number:<5} {words}" for op, words in MEANINGS.items() if op in {a.op for a in actions}]
    if chunk and any(action.chunk for action in actions):
        names.append(f"{chunk:<5} the same in chunk 1, the rank's second piece of the model")
    names += [f"{'--' if grid.named else 'small':<5} it goes on", f"{'.':<5} the rank is idle"]
    return [f"  {name}" for name in names]


def as_dict(timeline: Timeline, times: Times, message_bytes: int | None) -> dict[str, Any]:
    """For --json; times in the unit of --times."""
    return {
        **timeline.schedule.shape(),
        "times": asdict(times),
        "proved": proved(timeline),
        "step_time": timeline.makespan,
        "idle_share": timeline.bubble,
        "message_bytes": message_bytes,
        "per_rank": [_rank_dict(timeline, rank, message_bytes) for rank in range(len(timeline.spans))],
    }


def panel(timeline: Timeline) -> Panel:
    """For a picture."""
    name = f"{title(timeline.schedule)}: {timeline.makespan:.6g} ticks, {percent(timeline.bubble)} idle"
    return Panel(name, timeline.spans, timeline.makespan, tuple(f"idle {percent(s)}" for s in timeline.idle_share))


def _margin(rows: Rows) -> int:
    return len(f"rank {len(rows) - 1}") + 2


def _rank_dict(timeline: Timeline, rank: int, message_bytes: int | None) -> dict[str, Any]:
    spans, actions = timeline.spans[rank], timeline.schedule.actions[rank]
    return {
        "rank": rank,
        "idle_share": timeline.idle_share[rank],
        "peak_live": timeline.peak_live[rank],
        "messages": timeline.messages[rank],
        "bytes": None if message_bytes is None else timeline.messages[rank] * message_bytes,
        "actions": [str(action) for action in actions],
        "spans": [_span_dict(span) for span in spans],
    }


def _span_dict(span: Span) -> dict[str, Any]:
    action, start, end = span
    return {"action": str(action), "start": start, "end": end}


def _rank_table(timeline: Timeline, message_bytes: int | None) -> list[str]:
    rows = []
    for rank, (idle, live, sent) in enumerate(
        zip(timeline.idle_share, timeline.peak_live, timeline.messages, strict=True)
    ):
        size = [] if message_bytes is None else [bytes_text(sent * message_bytes)]
        rows.append([str(rank), percent(idle), str(live), str(sent), *size])
    return table(["rank", "idle", "peak live", "messages sent", *(["sent"] if message_bytes is not None else [])], rows)


def _words(schedule: Schedule, message_bytes: int | None) -> list[str]:
    chunks = schedule.placement.chunks
    share = f" and one of the rank's {chunks} chunks" if chunks > 1 else ""
    live = f"peak live: activations held at once for a backward to come, each of one microbatch{share}"
    size = "" if message_bytes is None else f"; a message has {bytes_text(message_bytes)}"
    return [f"  {live}", f"  messages: to other ranks in one step, activations and gradients{size}"]
