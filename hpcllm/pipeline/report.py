"""Reports on schedules, for people and as JSON: one schedule by itself, or all side by side for one shape. Pure.

One schedule: what was proved, the grid, and the numbers of each rank.

    proved: no deadlock, ...
            0         10                          rank     idle   peak live   messages
    rank 0  F0 F1 .  B0--- ...                    0      27.3 %           4          8

All schedules: a row each, with the time of a step, what is idle and held, and what recomputation does to it. Peak live
is in activations of a rank's whole part of the model, so that chunks compare: 3 of 2 chunks are 1.5. With recomputation
an activation that waits is only the input of its stage, but from its B or I to the end of its B or W everything that
was computed again is there: "in full". A schedule that defers W holds several of those, which is what recomputation was
to avoid, and its gain over 1f1b changes: the notes say how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.grid import fit_labelled, legend_lines, timeline_lines
from hpcllm.pipeline.picture import Panel
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.timing import Timeline, Times, simulate
from hpcllm.system.text import binary_size_text, narrowed, percent, table

BASE = "1f1b"  # the schedule that the others are compared with
MOST_COMPARED = 1 << 12  # forward passes of a schedule, of which there are five: seconds of work


def schedule_lines(timeline: Timeline, times: Times, columns: int, message_bytes: int | None) -> list[str]:
    """The report on one schedule that has passed the checker."""
    spans, grid = timeline.spans, fit_labelled([timeline.spans], columns)
    chunks = timeline.schedule.placement.chunks
    share = f" and one of the rank's {chunks} chunks" if chunks > 1 else ""
    size = "" if message_bytes is None else f"; a message has {binary_size_text(message_bytes)}"
    return [
        timeline.schedule.title(),
        _times_text(times),
        *(f"proved: {line}" for line in _proved(timeline)),
        "",
        *timeline_lines(grid, spans, timeline.makespan, "ticks"),
        *legend_lines(grid, spans),
        "",
        f"a step takes {timeline.makespan:.6g} ticks; the bubble is {percent(timeline.bubble)} of the ranks' time",
        *_rank_table(timeline, message_bytes),
        f"  peak live: activations held at once for a backward to come, each of one microbatch{share}",
        f"  messages: to other ranks in one step, activations and gradients{size}",
    ]


def schedule_facts(timeline: Timeline, times: Times, message_bytes: int | None) -> dict[str, Any]:
    """Numbers of one schedule for --json; times in the unit of --times."""
    return {
        **timeline.schedule.shape(),
        "times": asdict(times),
        "proved": _proved(timeline),
        "step_time": timeline.makespan,
        "idle_share": timeline.bubble,
        "message_bytes": message_bytes,
        "per_rank": [_rank_facts(timeline, rank, message_bytes) for rank in range(len(timeline.spans))],
    }


def schedule_panel(timeline: Timeline) -> Panel:
    """The timeline for a picture."""
    title = f"{timeline.schedule.title()}: {timeline.makespan:.6g} ticks, {percent(timeline.bubble)} idle"
    return Panel(title, timeline.spans, timeline.makespan, tuple(f"idle {percent(s)}" for s in timeline.idle_share))


def _proved(timeline: Timeline) -> list[str]:
    """Say in sentences what `check` has shown."""
    schedule, messages = timeline.schedule, sum(timeline.messages)
    once = (
        f"each of {schedule.microbatches} microbatches goes forward and backward through "
        f"{schedule.placement.stages} stages, once, in a possible order"
    )
    matched = f"each of {messages} messages is sent once and received once, and none can be taken for another"
    alive = "no deadlock, even if every send blocks until its receive is posted"
    return [once, *[matched] * (messages > 0), alive]


def _times_text(times: Times) -> str:
    again = "; B and I do F again (recomputation)" if times.recompute else ""
    return (
        f"ticks for a rank's part of the model: F={times.forward:g} B={times.backward:g}, of which W={times.weight:g}; "
        f"a message {times.send:g}{again}"
    )


def _rank_table(timeline: Timeline, message_bytes: int | None) -> list[str]:
    columns = zip(timeline.idle_share, timeline.peak_live, timeline.messages, strict=True)
    rows = [
        [str(rank), percent(idle), str(live), str(sent), *_size_cell(sent, message_bytes)]
        for rank, (idle, live, sent) in enumerate(columns)
    ]
    return table(["rank", "idle", "peak live", "messages sent", *(["sent"] if message_bytes is not None else [])], rows)


def _size_cell(messages: int, message_bytes: int | None) -> list[str]:
    return [] if message_bytes is None else [binary_size_text(messages * message_bytes)]


def _rank_facts(timeline: Timeline, rank: int, message_bytes: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "idle_share": timeline.idle_share[rank],
        "peak_live": timeline.peak_live[rank],
        "messages": timeline.messages[rank],
        "bytes": None if message_bytes is None else timeline.messages[rank] * message_bytes,
        "actions": [str(action) for action in timeline.schedule.actions[rank]],
        "spans": [{"action": str(a), "start": start, "end": end} for a, start, end in timeline.spans[rank]],
    }


@dataclass(frozen=True)
class Entry:
    """One schedule in the comparison."""

    timeline: Timeline
    plain_step_time: float  # without recomputation

    @property
    def name(self) -> str:
        return self.timeline.schedule.name

    @property
    def peak_live(self) -> float:
        """Activations on the rank that holds most, in whole parts of the model."""
        return max(self.timeline.peak_live) / self.timeline.schedule.placement.chunks

    @property
    def peak_full(self) -> float:
        """Activations that recomputation has brought back, in the unit of `peak_live`."""
        return max(map(peak_full, self.timeline.schedule.actions)) / self.timeline.schedule.placement.chunks


@dataclass(frozen=True)
class Comparison:
    times: Times
    entries: tuple[Entry, ...]
    rejected: dict[str, str]  # name -> why it cannot have this shape


def compare(ranks: int, microbatches: int, chunks: int | None, times: Times) -> Comparison:
    """Simulate all schedules of one shape. chunks: for the schedules that can have any number; None: their default.

    Raises ScheduleError if no schedule can have the shape, or if each is larger than MOST_COMPARED.
    """
    entries, rejected = [], {}
    for name, kind in SCHEDULES.items():
        try:
            schedule = make_schedule(name, ranks, microbatches, chunks if kind.any_chunks else None, MOST_COMPARED)
            check(schedule)
        except ScheduleError as error:
            rejected[name] = str(error)
            continue
        plain = simulate(schedule, replace(times, recompute=False))
        entries.append(Entry(simulate(schedule, times) if times.recompute else plain, plain.makespan))
    if not entries:
        raise ScheduleError(f"no schedule of this shape can be compared: {rejected[BASE]}")
    return Comparison(times, tuple(entries), rejected)


def peak_full(actions: Sequence[Action]) -> int:
    """Activations of one microbatch and chunk that a rank holds in full at once, if it recomputes."""
    held = peak = 0
    for action in actions:
        held += action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        peak = max(peak, held)
        held -= action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return peak


def comparison_lines(comparison: Comparison, message_bytes: int | None, columns: int) -> list[str]:
    """The table, with the columns that fit, what they mean, and the notes."""
    recompute, sized = comparison.times.recompute, message_bytes is not None
    head = ["schedule", "chunks", "step time", "idle", "peak live", "messages", *["sent"] * sized]
    head += ["in full", "without it", "it costs"] * recompute
    rows = [_row(entry, recompute, message_bytes) for entry in comparison.entries]
    rows += [[name, f"rejected: {reason}"] for name, reason in comparison.rejected.items()]
    head, rows = narrowed(head, rows, ("messages", "it costs", "chunks", "sent"), columns)
    legend = [
        "step time in ticks; idle and messages of all ranks together",
        "peak live: activations held at once on the rank that holds most, each of a rank's whole part of the model",
        *[
            "in full: how many of these are there in full at once; of the others recomputation keeps only the input",
            "without it: the step time without recomputation",
        ]
        * recompute,
        *(f"note: {note}" for entry in comparison.entries for note in _notes(entry, comparison)),
    ]
    schedule = comparison.entries[0].timeline.schedule
    shape = f"{schedule.placement.ranks} ranks, {schedule.microbatches} microbatches"
    return [shape, _times_text(comparison.times), "", *table(head, rows), *(f"  {line}" for line in legend)]


def comparison_facts(comparison: Comparison, message_bytes: int | None) -> dict[str, Any]:
    """Numbers of the comparison for --json; a schedule that was rejected has no more than the reason."""
    entries = [_entry_facts(entry, comparison, message_bytes) for entry in comparison.entries]
    rejected = [{"schedule": name, "refused": reason} for name, reason in comparison.rejected.items()]
    return {"times": asdict(comparison.times), "schedules": [*entries, *rejected]}


def _row(entry: Entry, recompute: bool, message_bytes: int | None) -> list[str]:
    timeline, plain, sent = entry.timeline, entry.plain_step_time, sum(entry.timeline.messages)
    row = [entry.name, str(timeline.schedule.placement.chunks), f"{timeline.makespan:.6g}", percent(timeline.bubble)]
    row += [f"{entry.peak_live:.4g}", str(sent), *_size_cell(sent, message_bytes)]
    return row + [f"{entry.peak_full:.4g}", f"{plain:.6g}", f"+{percent(timeline.makespan / plain - 1)}"] * recompute


def _entry_facts(entry: Entry, comparison: Comparison, message_bytes: int | None) -> dict[str, Any]:
    timeline, sent = entry.timeline, sum(entry.timeline.messages)
    return {
        "schedule": entry.name,
        "chunks": timeline.schedule.placement.chunks,
        "step_time": timeline.makespan,
        "idle_share": timeline.bubble,
        "peak_live_whole": entry.peak_live,
        "messages": sent,
        "bytes": None if message_bytes is None else sent * message_bytes,
        "step_time_without_recomputation": entry.plain_step_time,
        "peak_full_whole": entry.peak_full if comparison.times.recompute else None,
        "notes": _notes(entry, comparison),
    }


def _notes(entry: Entry, comparison: Comparison) -> list[str]:
    """Say what recomputation does to a schedule that splits the backward pass."""
    base = next((other for other in comparison.entries if other.name == BASE), None)
    split = any(action.op is Op.BACKWARD_WEIGHT for row in entry.timeline.schedule.actions for action in row)
    if not comparison.times.recompute or not split or not base:
        return []
    with_it = 1 - entry.timeline.makespan / base.timeline.makespan
    without = 1 - entry.plain_step_time / base.plain_step_time
    notes = [f"{entry.name} saves {percent(with_it)} of the step of {BASE}, {percent(without)} without recomputation"]
    if with_it <= 0:
        notes = [f"with recomputation {entry.name} gains nothing over {BASE} ({percent(-with_it)} longer)"]
    if entry.peak_full > base.peak_full:
        held = f"{entry.peak_full:.4g} recomputed activations in full where {BASE} holds {base.peak_full:.4g}"
        saves = ": it saves no memory" if entry.peak_full >= entry.peak_live else ""
        notes.append(f"{entry.name}, whose W wait, holds {held}{saves}")
    return notes
