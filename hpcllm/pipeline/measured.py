"""Reading a trace: a step as it was measured, with what each rank computed and waited for, and when.

    trace (Chrome's JSON, microseconds)               one Measured a replica, seconds since its first rank entered
    tid 1 |  F0 |  F1 |wait|   B0   |                 rows    ((F0, 0.0, 0.2), (F1, 0.2, 0.4), (B0, 0.5, 0.9)), ...
    tid 2 | wait |  F0 |   B0   |wait|                waits   (("the gradient of ...", 0.4, 0.5),), ...

A trace is a file from elsewhere: everything in it is checked, and the actions that were measured must be those of the
schedule that it names, in that order. Pure.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcllm.config.input_files import LARGEST_TABLE_BYTES, read_text
from hpcllm.errors import DataError, ScheduleError
from hpcllm.pipeline.actions import Action, Placement
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.clock import Span
from hpcllm.pipeline.grid import Rows
from hpcllm.pipeline.schedules import Schedule

Wait = tuple[str, float, float]  # a name, start, end
CLOCK_STEP_S = 2e-6  # overlap of two events that rounding to microseconds may cause
FIRST_ID = 1  # number of the first replica and rank; Perfetto takes 0 for the idle task of Linux
LARGEST = 1 << 31  # largest count in a trace
LONGEST_NAME = 40  # characters of an action's name that an error repeats
T = TypeVar("T")
_Events = dict[tuple[str, int, int], list[Wait]]  # category, replica, rank


@dataclass(frozen=True)
class Measured:
    """The pipeline part of one step of one replica; times in seconds since the first of its ranks entered it."""

    schedule: Schedule
    step: int
    replica: int
    clock_error_s: float  # between two ranks, at most
    rows: Rows  # spans that each rank computed
    waits: tuple[tuple[Wait, ...], ...]  # waits of each rank

    @property
    def entries(self) -> tuple[float, ...]:
        """Time at which each rank began to compute or to wait."""
        return tuple(
            min(start for _, start, _ in (*row, *waits)) for row, waits in zip(self.rows, self.waits, strict=True)
        )

    @property
    def end(self) -> float:
        """Time at which the last rank had neither anything to compute nor to wait for."""
        return max(end for row in (*self.rows, *self.waits) for _, _, end in row)


def read_trace(path: Path) -> tuple[Measured, ...]:
    """Read each replica's measured step, in order. Raises DataError, for a file that cannot be read too."""
    try:
        text = read_text(path, LARGEST_TABLE_BYTES)
    except ValueError as error:
        raise DataError(f"the trace {str(path)!r} cannot be read: {error}") from error
    try:
        return parse_trace(text)
    except (DataError, ScheduleError) as error:
        raise DataError(f"{str(path)!r} is no trace that a run wrote: {error}") from error


def parse_trace(text: str) -> tuple[Measured, ...]:
    """Read each replica's measured step from a trace's text. Raises DataError, ScheduleError."""
    try:
        trace = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON: {error}") from error
    about = _value(trace, "otherData", dict)
    schedule = _schedule(about)
    step, error_s = _count(about, "step", least=0), _number(about, "clock_error_us") / 1e6
    events = _events(_value(trace, "traceEvents", list), schedule.placement.ranks)
    replicas = sorted({replica for _, replica, _ in events})
    if not replicas:
        raise DataError("no event in it is one of compute or wait")
    return tuple(_measured(schedule, step, replica, error_s, events) for replica in replicas)


def _measured(schedule: Schedule, step: int, replica: int, clock_error_s: float, events: _Events) -> Measured:
    rows = _rows(schedule, replica, events)
    waits = [sorted(events["wait", replica, rank], key=_start) for rank in range(schedule.placement.ranks)]
    zero = min([start for row in rows for _, start, _ in row] + [start for row in waits for _, start, _ in row])
    return Measured(schedule, step, replica, clock_error_s, _since(zero, rows), _since(zero, waits))


def _since(zero: float, rows: list[list[tuple[T, float, float]]]) -> tuple[tuple[tuple[T, float, float], ...], ...]:
    return tuple(tuple((what, start - zero, end - zero) for what, start, end in row) for row in rows)


def _rows(schedule: Schedule, replica: int, events: _Events) -> list[list[Span]]:
    """Collect what each rank of a replica computed, which must be what its schedule says."""
    rows = []
    for rank, planned in enumerate(schedule.work()):
        found = sorted(events["compute", replica, rank], key=_start)
        where = f"rank {rank} of replica {replica}"
        if [name for name, _, _ in found] != [str(action) for action in planned]:
            raise DataError(f"{where} {_difference([name for name, _, _ in found], planned)}")
        rows.append(_one_after_the_other(where, [(a, s, e) for a, (_, s, e) in zip(planned, found, strict=True)]))
    return rows


def _difference(found: Sequence[str], planned: Sequence[Action]) -> str:
    for k, (name, action) in enumerate(zip(found, planned, strict=False)):
        if name != str(action):
            return f"did {name[:LONGEST_NAME]!r} as its action {k}, where its schedule says {str(action)!r}"
    return f"did {len(found)} actions, its schedule says {len(planned)}"


def _one_after_the_other(where: str, row: Sequence[Span]) -> list[Span]:
    """Remove overlaps that come from rounding. Raises DataError for larger ones."""
    apart, free = list[Span](), -math.inf
    for action, start, end in row:
        if start < free - CLOCK_STEP_S:
            raise DataError(f"{where} began {action} {free - start:.6f} s before it was done with the action before")
        start = max(start, free)
        free = max(start, end)
        apart.append((action, start, free))
    return apart


def _schedule(about: dict[str, Any]) -> Schedule:
    """Read the schedule that was run. Raises DataError, ScheduleError."""
    name, kind = _value(about, "schedule", str), _value(about, "placement", str)
    if kind not in ("loop", "v"):
        raise DataError(f"its placement is {kind!r}; valid: 'loop', 'v'")
    ranks, chunks, microbatches = (_count(about, key, least=1) for key in ("ranks", "chunks", "microbatches"))
    rows = _value(about, "actions", list)
    if not all(isinstance(row, list) for row in rows):
        raise DataError("its actions are not lists, one for each rank")
    try:
        actions = tuple(tuple(Action.parse(str(text)[:LONGEST_NAME]) for text in row) for row in rows)
    except ValueError as error:
        raise DataError(f"{error}") from error
    schedule = Schedule(name, Placement(ranks, chunks, kind), microbatches, actions)  # type: ignore[arg-type]
    check(schedule)
    return schedule


def _events(events: list[Any], ranks: int) -> _Events:
    """Collect name, start and end of what was computed and waited for, in seconds."""
    found: _Events = defaultdict(list)
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") not in ("compute", "wait"):
            continue  # names of tracks, and what another tool may have added
        rank = _count(event, "tid", least=FIRST_ID) - FIRST_ID
        if rank >= ranks:
            raise DataError(f"an event is of rank {rank}; its schedule has {ranks} ranks, from 0")
        start, duration = _number(event, "ts"), _number(event, "dur")
        if duration < 0:
            raise DataError(f"an event has the duration {duration:g}")
        place = event["cat"], _count(event, "pid", least=FIRST_ID) - FIRST_ID, rank
        found[place].append((_value(event, "name", str), start / 1e6, (start + duration) / 1e6))
    return found


def _start(event: Wait) -> float:
    return event[1]


def _value(table: Any, key: str, kind: type[T]) -> T:
    """Get a value of the given type. Raises DataError if it is missing or of another type."""
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"it has no {key!r} that is a {kind.__name__}")
    return value


def _count(table: dict[str, Any], key: str, least: int) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise DataError(f"it has no {key!r} that is a whole number of {least} to {LARGEST}")
    return value


def _number(table: dict[str, Any], key: str) -> float:
    value = table.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e18:
        raise DataError(f"it has no {key!r} that is a number")
    return float(value)
