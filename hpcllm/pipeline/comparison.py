"""All schedules side by side for one shape: what a step takes, idles and holds, and what recomputation does to it.

Peak live is in activations of a rank's whole part of the model, so that chunks compare: 3 of 2 chunks are 1.5. With
recomputation an activation that waits is only the input of its stage, but from its B or I to the end of its B or W
everything that was computed again is there: "in full". A schedule that puts W off holds several of those, which is what
recomputation was to avoid, and its gain over 1f1b changes: the notes say how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.report import times_text
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.pipeline.table import bytes_text, percent, table
from hpcllm.pipeline.timing import Timeline, Times, simulate

BASE = "1f1b"  # what the others are measured against


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
        """Of the rank that holds most, in whole parts of the model."""
        return max(self.timeline.peak_live) / self.timeline.schedule.placement.chunks

    @property
    def peak_full(self) -> float:
        """The same of what recomputation has brought back."""
        return max(map(peak_full, self.timeline.schedule.actions)) / self.timeline.schedule.placement.chunks


@dataclass(frozen=True)
class Comparison:
    times: Times
    entries: tuple[Entry, ...]
    refused: dict[str, str]  # name -> why it cannot have this shape


def compare(ranks: int, microbatches: int, chunks: int | None, times: Times) -> Comparison:
    """chunks: of the schedules that can have any number of them; None: their default.

    Raises ScheduleError if no schedule can have the shape.
    """
    entries, refused = [], {}
    for name, kind in SCHEDULES.items():
        try:
            schedule = make_schedule(name, ranks, microbatches, chunks if kind.any_chunks else None)
            check(schedule)
        except ScheduleError as error:
            refused[name] = str(error)
            continue
        plain = simulate(schedule, replace(times, recompute=False))
        entries.append(Entry(simulate(schedule, times) if times.recompute else plain, plain.makespan))
    if not entries:
        raise ScheduleError(f"no schedule can have this shape: {refused[BASE]}")
    return Comparison(times, tuple(entries), refused)


def peak_full(actions: Sequence[Action]) -> int:
    """Activations of one microbatch and chunk that a rank holds in full at once, if it recomputes."""
    held = peak = 0
    for action in actions:
        held += action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        peak = max(peak, held)
        held -= action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return peak


def lines(comparison: Comparison, message_bytes: int | None) -> list[str]:
    """The table, what its columns mean, and the notes."""
    again, sized = comparison.times.recompute, message_bytes is not None
    head = ["schedule", "chunks", "step time", "idle", "peak live", "messages", *["sent"] * sized]
    head += ["in full", "without it", "it costs"] * again
    rows = [_row(entry, again, message_bytes) for entry in comparison.entries]
    rows += [[name, f"refused: {reason}"] for name, reason in comparison.refused.items()]
    notes = [f"  note: {note}" for entry in comparison.entries for note in _notes(entry, comparison)]
    schedule = comparison.entries[0].timeline.schedule
    shape = f"{schedule.placement.ranks} ranks, {schedule.microbatches} microbatches"
    return [shape, times_text(comparison.times), "", *table(head, rows), *_words(again), *notes]


def as_dict(comparison: Comparison, message_bytes: int | None) -> dict[str, Any]:
    """For --json; a schedule that is refused has no more than the reason."""
    entries = [_entry_dict(entry, comparison, message_bytes) for entry in comparison.entries]
    refused = [{"schedule": name, "refused": reason} for name, reason in comparison.refused.items()]
    return {"times": asdict(comparison.times), "schedules": [*entries, *refused]}


def _row(entry: Entry, again: bool, message_bytes: int | None) -> list[str]:
    timeline, plain, sent = entry.timeline, entry.plain_step_time, sum(entry.timeline.messages)
    row = [entry.name, str(timeline.schedule.placement.chunks), f"{timeline.makespan:.6g}", percent(timeline.bubble)]
    row += [f"{entry.peak_live:.4g}", str(sent), *([] if message_bytes is None else [bytes_text(sent * message_bytes)])]
    return row + [f"{entry.peak_full:.4g}", f"{plain:.6g}", f"+{percent(timeline.makespan / plain - 1)}"] * again


def _words(again: bool) -> list[str]:
    words = [
        "step time in ticks; idle and messages of all ranks together",
        "peak live: activations held at once on the rank that holds most, each of a rank's whole part of the model",
    ]
    if again:
        words += [
            "in full: how many of these are there in full at once; of the others recomputation keeps only the input",
            "without it: the step time without recomputation",
        ]
    return [f"  {word}" for word in words]


def _entry_dict(entry: Entry, comparison: Comparison, message_bytes: int | None) -> dict[str, Any]:
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
    """What recomputation does to a schedule that splits the backward pass."""
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
        told = f"{entry.peak_full:.4g} recomputed activations in full where {BASE} holds {base.peak_full:.4g}"
        saves = ": it saves no memory" if entry.peak_full >= entry.peak_live else ""
        notes.append(f"{entry.name}, whose W wait, holds {told}{saves}")
    return notes
