"""A run folder as a report reads it: log, run file, traces, generated text. Whatever is missing is said, not rejected.

    {"step": 0, "start": {...}}                    a start: machine, versions, layout
    {"step": 1, "parameters_memory_bytes": ...}    memory, once a start
    {"step": 10, "loss": ..., "step_s": ...}       a logged step: at most MOST_STEPS of them are kept as records,
    {"step": 20, "loss": ..., ...}                 evenly, but step and loss of every one
    {"step": 20, "validation_loss": ...}
    {"step": 20, "evaluation/sort:5/acc": ...}
    {"step": 20, "checkpoint_s": ...}
    {"step": 20, "end": {...}}                     the end of a start that ended by itself

The log may be cut off, still growing, of an older version, a million lines long: a line that is no record is counted
and passed over, and no key is required of the others.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import tomllib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.config.input_files import LARGEST_TABLE_BYTES, open_regular, read_bytes
from hpcllm.config.rules import MOST_RANKS
from hpcllm.errors import DataError
from hpcllm.system import json_lines
from hpcllm.system.json_lines import record_of
from hpcllm.system.text import printable_path

Record = dict[str, Any]
MOST_STEPS = 4000  # records; a picture has about a thousand points
LARGEST = 1e100  # no number of a log comes near it, and sums and squares of such numbers are floats
MOST_NAMED = 8  # runs, in the message of an error
IS_STEP = b'"loss": '
TASKS = "evaluation/"  # before the names of tasks and figures
_STEP, _LOSS = re.compile(rb'"step": (\d+)'), re.compile(rb'"loss": ([^,}\s]+)')


@dataclass
class History:
    """Records of a log, by kind."""

    steps: list[Record] = field(default_factory=list)  # logged ones, one in `every`
    every: int = 1
    logged: int = 0  # lines of logged steps
    loss: tuple[array[float], array[float]] = field(default_factory=lambda: (array("d"), array("d")))  # step, loss
    validations: list[Record] = field(default_factory=list)
    tasks: list[Record] = field(default_factory=list)
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


def unit_of(history: History) -> str:
    """Unit of the losses of a log."""
    if "groups_without_signal" in history.last:
        return "of the policy, a token; held out: minus the reward"
    return "nats a pair" if "rewards/margins" in history.last else "nats a token"


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
        record = record_of(line)
        if record is None:
            history.broken += 1
        else:
            _file(history, record)
    return history


def _lines(path: Path) -> Iterator[bytes]:
    with os.fdopen(open_regular(path), "rb") as file:
        yield from filter(bytes.strip, file)


def _is_step(line: bytes) -> bool:
    """True if the line is a whole record of a logged step, without reading all of it."""
    return IS_STEP in line and line.rstrip().endswith(b"}")


def _note_loss(history: History, line: bytes) -> None:
    step, loss = _STEP.search(line), _LOSS.search(line)
    if not (step and loss):
        return
    try:
        value = float(loss[1])  # NaN and Infinity as Python's json writes them
    except ValueError:
        return
    if float(step[1]) < json_lines.MOST_STEPS:
        history.loss[1].append(math.nan if LARGEST <= abs(value) < math.inf else value)
        history.loss[0].append(float(step[1]))
    history.overflows += b'"grad_norm": null' in line


def _file(history: History, record: Record) -> None:
    """Add a record to those of its kind; one of no known kind was written by another version and is left out."""
    record = _sound(record)
    if "loss" in record:
        history.steps.append(record)
    elif "validation_loss" in record:
        history.validations.append(record)
    elif any(key.startswith(TASKS) for key in record):
        history.tasks.append(record)
    elif "checkpoint_s" in record:
        history.checkpoints.append(record)
    elif "parameters_memory_bytes" in record:
        history.memory.append(record)
    elif isinstance(record.get("start"), dict):
        history.starts.append(record)
    elif isinstance(record.get("end"), dict):
        history.ends.append(record)


def _sound(record: Record) -> Record:
    """Leave out what no run writes: numbers that are no floats, and tables of another shape than the page takes."""
    return {key: _bounded(value) for key, value in record.items() if KINDS.get(key, lambda _: True)(value)}


def _bounded(value: Any) -> Any:
    if isinstance(value, dict):
        return _sound(value)
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    is_number = type(value) in (int, float)
    return math.nan if is_number and not abs(value) < LARGEST else value


def _is_mesh(value: Any) -> bool:
    """True for {"dp": 4, "pp": 2, "tp": 1} of so many ranks as a job can have."""
    sizes = list(value.values()) if isinstance(value, dict) and set(value) == {"dp", "pp", "tp"} else [0]
    return all(type(size) is int and 1 <= size <= MOST_RANKS for size in sizes) and math.prod(sizes) <= MOST_RANKS


KINDS: dict[str, Callable[[Any], bool]] = {  # key of a record, or of a table in it -> may it be so?
    "mesh": _is_mesh,
    "slurm": lambda value: isinstance(value, dict),
    "flux_job": lambda value: isinstance(value, str),
    "versions": lambda value: isinstance(value, dict),
    "memory_stages": lambda value: isinstance(value, list) and all(isinstance(stage, dict) for stage in value),
}


@dataclass(frozen=True)
class Run:
    """A run; two of a report never have the same name."""

    folder: Path
    name: str
    run_file: str  # its text; "" if there is none
    tables: dict[str, Any]  # what it says; {} if it is no TOML
    history: History
    traces: tuple[Path, ...]
    samples: tuple[tuple[Path, Record], ...]  # samples/*.json, as `generate --json` makes them
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
    except ValueError as error:
        raise DataError(f"cannot read {str(log)!r}: {error}") from error
    text = _text(folder / "run.toml")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError):
        tables = {}
    traces = tuple(sorted(folder.glob("trace/step_*.json")))
    return Run(folder, name, text, tables, history, traces, _samples(folder), age_s)


def _samples(folder: Path) -> tuple[tuple[Path, Record], ...]:
    """Generated texts, the oldest first; a file of anything else is passed over."""
    found = []
    for path in sorted(folder.glob("samples/*.json"), key=lambda path: (path.stat().st_mtime, path.name)):
        try:
            sample = json.loads(_text(path))
        except (ValueError, RecursionError):
            continue
        kinds = {"prompt": str, "text": str, "tokens": int}
        if isinstance(sample, dict) and all(isinstance(sample.get(key), kind) for key, kind in kinds.items()):
            found.append((path, sample))
    return tuple(found)


def _distinct(names: list[str], folders: list[Path]) -> list[str]:
    """Names, or the whole path where two runs have one name; with a number where they are one folder."""
    named = [
        name if names.count(name) == 1 else printable_path(str(folder))
        for name, folder in zip(names, folders, strict=True)
    ]
    return [name if named.count(name) == 1 else f"{name} ({k + 1})" for k, name in enumerate(named)]


def _text(path: Path) -> str:
    try:
        return read_bytes(path, LARGEST_TABLE_BYTES).decode("utf-8", errors="replace")
    except ValueError:
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
