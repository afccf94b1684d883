"""Tasks: what --task names, read and checked before a model is loaded, and scored by it.

store.h5                 held-out split of a token store       loss, perplexity, bits per byte
rows.jsonl, arc=x.csv    examples of a file (benchmarks.py)    acc, acc_norm, acc_bytes, loss of the right choice;
                                                               of fixed answers acc, perplexity
reverse, sort:8          made with a seed (problems.py)        the same

rank 0: examples --> tokens, to all ranks --> scores (scoring.py) --> rank 0: figures, by group too
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.errors import ConfigError
from hpcllm.evaluation.benchmarks import FORMATS
from hpcllm.evaluation.example_files import read_examples
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.figures import Figure, as_dicts, exponential, mean, share
from hpcllm.evaluation.problems import FAMILIES, check_size, problems

if TYPE_CHECKING:
    from hpcllm.evaluation.scoring import Score

STORE_SUFFIXES = (".h5", ".hdf5")
MOST_GROUPS = 1000


@dataclass(frozen=True)
class TaskName:
    """A task as it was named. Of a file: its format, "store" of a token store; of problems: their size."""

    text: str
    kind: str  # "store", a name of FORMATS, or a name of FAMILIES
    path: Path | None = None
    size: int = 0

    @property
    def is_store(self) -> bool:
        return self.kind == "store"


@dataclass(frozen=True)
class Result:
    """Figures of a task; of a task with groups also those of each group."""

    task: str
    kind: str
    examples: int  # rows, of a store
    figures: Mapping[str, Figure]
    groups: Mapping[str, tuple[int, Mapping[str, Figure]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for --json."""
        of_groups = {name: {"examples": n, "figures": as_dicts(found)} for name, (n, found) in self.groups.items()}
        own = {"task": self.task, "kind": self.kind, "examples": self.examples, "figures": as_dicts(self.figures)}
        return own | ({"groups": of_groups} if of_groups else {})


def parse_task(text: str) -> TaskName:
    """Read the name of a task. Raises ConfigError that lists what would be valid."""
    name, _, rest = text.partition("=")
    if rest and name in FORMATS:
        return TaskName(text, name, Path(rest))
    if (found := re.fullmatch(r"([a-z]+)(?::([0-9]{1,6}))?", text)) and found[1] in FAMILIES:
        size = int(found[2]) if found[2] else FAMILIES[found[1]].sizes[1]
        check_size(found[1], size)
        return TaskName(text, found[1], size=size)
    path = Path(text)
    if path.suffix in STORE_SUFFIXES:
        return TaskName(text, "store", path)
    if path.suffix:
        return TaskName(text, "own", path)
    raise ConfigError(
        f"{text!r} is no task; valid: a token store (.h5), a file of examples (.jsonl), FORMAT=FILE with FORMAT one of "
        f"{', '.join(FORMATS)}, or made problems: {', '.join(FAMILIES)}, with a size as in sort:8"
    )


def examples_of(task: TaskName, count: int, seed: int, limit: int | None = None) -> list[Example]:
    """Read or make the examples of a task that is no store. Not collective.

    count, seed: of made problems. limit: take so many of a file at most. Raises UserError.
    """
    if task.path is None:
        return problems(task.kind, task.size, count, seed)
    return read_examples(task.path, task.kind)[:limit]


def result_of(task: TaskName, examples: Sequence[Example], scores: Sequence[Score]) -> Result:
    """Make the figures of a task from the scores of all choices, in order."""
    rows, start = [], 0
    for example in examples:
        rows.append(_row(example, scores[start : start + len(example.choices)]))
        start += len(example.choices)
    by_group: dict[str, list[dict[str, float]]] = {}
    for example, row in zip(examples, rows, strict=True):
        by_group.setdefault(example.group, []).append(row)
    if len(by_group) > MOST_GROUPS:
        raise ConfigError(f"{task.text} has {len(by_group):,} groups; valid: up to {MOST_GROUPS:,}")
    groups = {name: (len(part), _figures(part)) for name, part in sorted(by_group.items()) if len(by_group) > 1}
    return Result(task.text, task.kind, len(rows), _figures(rows), groups)


def _row(example: Example, scores: Sequence[Score]) -> dict[str, float]:
    """Measure one example: shares as 0 or 1, and nats of the right answer."""
    nats = np.array([score.nats for score in scores])
    if not example.is_choice:
        return {"acc": float(scores[0].is_greedy), "loss": nats[0]}
    characters, size_bytes = (
        np.array([len(choice) if encoding is None else len(choice.encode(encoding)) for choice in example.choices])
        for encoding in (None, "utf-8")
    )
    by = {"acc": nats, "acc_norm": nats / characters, "acc_bytes": nats / size_bytes}
    return {**{name: float(np.argmin(x) == example.answer) for name, x in by.items()}, "loss": nats[example.answer]}


def _figures(rows: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """Average over examples; a file that mixes both kinds has the figures that all of them have."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    found = {name: mean(column) if name == "loss" else share(column) for name, column in columns.items()}
    if "acc_norm" not in found:
        found["perplexity"] = exponential(found["loss"])
    return found
