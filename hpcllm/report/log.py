"""A log.jsonl as it is found: cut off, still growing, of an older version, a million lines long.

    {"step": 0, "start": {...}}                    a start: machine, versions, layout
    {"step": 1, "parameters_memory_bytes": ...}    memory, once a start
    {"step": 10, "loss": ..., "step_s": ...}       a logged step: at most MOST_STEPS of them are kept as records,
    {"step": 20, "loss": ..., ...}                 evenly, but step and loss of every one
    {"step": 20, "validation_loss": ...}
    {"step": 20, "checkpoint_s": ...}
    {"step": 20, "end": {...}}                     the end of a start that ended by itself

What a line lacks, nobody asks of it; a line that is no record is counted and passed over.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
MOST_STEPS = 4000  # records; a picture has about a thousand points
IS_STEP = b'"loss": '
_STEP, _LOSS = re.compile(rb'"step": (\d+)'), re.compile(rb'"loss": ([^,}\s]+)')


@dataclass
class History:
    """What a log says."""

    steps: list[Record] = field(default_factory=list)  # logged ones, one in `every`
    every: int = 1
    logged: int = 0  # lines of logged steps
    loss: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))  # step, loss
    validations: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    memory: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    ends: list[Record] = field(default_factory=list)
    overflows: int = 0  # logged steps whose gradient was not finite
    broken: int = 0  # lines that are no record

    @property
    def last(self) -> Record:
        """The newest logged step; {} before there is one."""
        return self.steps[-1] if self.steps else {}

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """Steps, and what was logged there under a key; NaN where that was no number."""
        found = [(record["step"], number(record[key])) for record in self.steps if key in record]
        return [float(step) for step, _ in found], [value for _, value in found]


def number(value: Any) -> float:
    """NaN for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_log(path: Path) -> History:
    """Raises OSError."""
    total = sum(map(_is_step, _lines(path)))
    history = History(every=max(1, math.ceil(total / MOST_STEPS)))
    for line in _lines(path):
        if _is_step(line):
            history.logged += 1
            _note_loss(history, line)
            if history.logged % history.every and history.logged < total:
                continue  # the newest one is always kept
        record = _record(line)
        if record is None:
            history.broken += 1
        else:
            _file(history, record)
    return history


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from filter(bytes.strip, file)


def _is_step(line: bytes) -> bool:
    """Whether it is a whole record of a logged step, without reading all of it."""
    return IS_STEP in line and line.rstrip().endswith(b"}")


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_one else None


def _note_loss(history: History, line: bytes) -> None:
    step, loss = _STEP.search(line), _LOSS.search(line)
    if not (step and loss):
        return
    try:
        history.loss[1].append(float(loss[1]))  # NaN and Infinity as Python's json writes them
    except ValueError:
        return
    history.loss[0].append(float(step[1]))
    history.overflows += b'"grad_norm": null' in line


def _file(history: History, record: Record) -> None:
    """To its kind; what is of none was written by another version, and says nothing to this one."""
    if "loss" in record:
        history.steps.append(record)
    elif "validation_loss" in record:
        history.validations.append(record)
    elif "checkpoint_s" in record:
        history.checkpoints.append(record)
    elif "parameters_memory_bytes" in record:
        history.memory.append(record)
    elif isinstance(record.get("start"), dict):
        history.starts.append(record)
    elif isinstance(record.get("end"), dict):
        history.ends.append(record)
