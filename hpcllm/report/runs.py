"""A run folder as a report reads it: its log, its run file, its traces. Whatever is missing is said, not refused."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcllm.errors import DataError
from hpcllm.printable import printable_path
from hpcllm.report.log import History, read_log

MOST_NAMED = 8  # runs, in the message of a refusal


@dataclass(frozen=True)
class Run:
    """name: shown; two runs of a report never have the same."""

    folder: Path
    name: str
    run_file: str  # its text; "" if there is none
    tables: dict[str, Any]  # what it says; {} if it is no TOML
    history: History
    traces: tuple[Path, ...]
    age_s: float  # since the last line of the log was written

    def key(self, table: str, key: str) -> Any:
        """What the run file says; None if it does not."""
        found = self.tables.get(table)
        return found.get(key) if isinstance(found, dict) else None


def read_runs(folders: list[Path]) -> list[Run]:
    """Raises DataError for a folder that is no run."""
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
    """The whole path where two runs have one name; with a number where they are one folder."""
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
    """Names what would be valid: runs beside, inside, or where runs usually are."""
    if not folder.exists():
        what = f"no run {str(folder)!r}"
    elif not folder.is_dir():
        what = f"{str(folder)!r} is no folder of a run"
    else:
        what = f"{str(folder)!r} has no log.jsonl, so it is no run, or one that has not begun"
    near = {path.parent for place in (folder, folder.parent, Path("runs")) for path in place.glob("*/log.jsonl")}
    found = ", ".join(repr(str(path)) for path in sorted(near)[:MOST_NAMED])
    return f"{what}; valid: {found or 'the folder that `train` wrote, as in runs/NAME'}"
