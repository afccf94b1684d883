"""A run folder as a report reads it: its log, its run file, its traces. Whatever is missing is said, not rejected.

    {"step": 0, "start": {...}}                    a start: machine, versions, layout
    {"step": 1, "parameters_memory_bytes": ...}    memory, once a start
    {"step": 10, "loss": ..., "step_s": ...}       a logged step: at most MOST_STEPS of them are kept as records,
    {"step": 20, "loss": ..., ...}                 evenly, but step and loss of every one
    {"step": 20, "validation_loss": ...}
    {"step": 20, "checkpoint_s": ...}
    {"step": 20, "end": {...}}                     the end of a start that ended by itself

The log may be cut off, still growing, of an older version, a million lines long: a line that is no record is counted
and passed over, and no key is required of the others.
"""

from __future__ import annotations

import json
import math
import re
import time
import tomllib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.errors import DataError
from hpcllm.system.text import printable_path

Record = dict[str, Any]
MOST_STEPS = 4000  # records; a picture has about a thousand points
MOST_NAMED = 8  # runs, in the message of an error
IS_STEP = b'"loss": '
_STEP, _LOSS = re.compile(rb'"step": (\d+)'), re.compile(rb'"loss": ([^,}\s]+)')


@dataclass
class History:
    """Records of a log, by kind."""

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
    """A logged value as a float; NaN for what is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def read_log(path: Path) -> History:
    """Read a log, a long one thinned out. Raises OSError."""
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
    """True if the line is a whole record of a logged step, without reading all of it."""
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
    """Add a record to those of its kind; one of no known kind was written by another version and is left out."""
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


@dataclass(frozen=True)
class Run:
    """A run; two of a report never have the same name."""

    folder: Path
    name: str
    run_file: str  # its text; "" if there is none
    tables: dict[str, Any]  # what it says; {} if it is no TOML
    history: History
    traces: tuple[Path, ...]
    age_s: float  # since the last line of the log was written

    def key(self, table: str, key: str) -> Any:
        """Value of a key of the run file; None if it is not there."""
        found = self.tables.get(table)
        return found.get(key) if isinstance(found, dict) else None


def read_runs(folders: list[Path]) -> list[Run]:
    """Read each folder. Raises DataError for one that is no run."""
    names = _distinct([printable_path(folder.resolve().name) for folder in folders], folders)
    return [_read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read(folder: Path, name: str) -> Run:
    log = folder / "log.jsonl"
    try:
        history, age_s = read_log(log), time.time() - log.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DataError(_what_is_wrong(folder)) from error
    except OSError as error:
        raise DataError(f"cannot read {str(log)!r}: {error.strerror}") from error
    text = _text(folder / "run.toml")
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        tables = {}
    return Run(folder, name, text, tables, history, tuple(sorted(folder.glob("trace/step_*.json"))), age_s)


def _distinct(names: list[str], folders: list[Path]) -> list[str]:
    """Names, or the whole path where two runs have one name; with a number where they are one folder."""
    named = [
        name if names.count(name) == 1 else printable_path(str(folder))
        for name, folder in zip(names, folders, strict=True)
    ]
    return [name if named.count(name) == 1 else f"{name} ({k + 1})" for k, name in enumerate(named)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _what_is_wrong(folder: Path) -> str:
    """An error text with what would be valid: runs beside, inside, or where runs usually are."""
    if not folder.exists():
        what = f"no run {str(folder)!r}"
    elif not folder.is_dir():
        what = f"{str(folder)!r} is no folder of a run"
    else:
        what = f"{str(folder)!r} has no log.jsonl, so it is no run, or one that has not begun"
    near = {path.parent for place in (folder, folder.parent, Path("runs")) for path in place.glob("*/log.jsonl")}
    found = ", ".join(repr(str(path)) for path in sorted(near)[:MOST_NAMED])
    return f"{what}; valid: {found or 'the folder that `train` wrote, as in runs/NAME'}"
