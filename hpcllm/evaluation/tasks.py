"""Tasks: what --task names, read and checked before a model is loaded, and scored by it.

store.h5                 held-out split of a token store       loss, perplexity, bits per byte
rows.jsonl, arc=x.csv    examples of a file (benchmarks.py)    acc, acc_norm, acc_bytes, loss of the right choice;
                                                               of fixed answers acc, perplexity
reverse, sort:8          made with a seed (problems.py)        the same
generate=rows.jsonl      questions of a file, answered by      exact_match
gsm8k=test.jsonl         writing (question_formats.py)
generate=sort:8          the same of made problems
humaneval, humaneval=x.jsonl      programs (code_task.py)      pass@k

rank 0: examples --> tokens, to all ranks --> scores (scoring.py) --> rank 0: figures, by group too
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcllm.config.names import closest, shown
from hpcllm.errors import ConfigError, DataError
from hpcllm.evaluation.benchmarks import FORMATS, Format, Item
from hpcllm.evaluation.example_files import read_examples
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.figures import Figure, as_dicts, exponential, mean, share
from hpcllm.evaluation.judge_process import CODE
from hpcllm.evaluation.problems import FAMILIES, check_size, problems
from hpcllm.evaluation.question_formats import QUESTIONS
from hpcllm.evaluation.questions import Question
from hpcllm.evaluation.shots import AnyExample, Drawing, with_shots
from hpcllm.model.sampling import seed_of

if TYPE_CHECKING:
    from hpcllm.evaluation.scoring import Score
    from hpcllm.evaluation.settings import Options

STORE_SUFFIXES = (".h5", ".hdf5")
MOST_GROUPS = 1000


@dataclass(frozen=True)
class TaskName:
    """A task as it was named. Of a file: its format, "store" of a token store; of problems: their size."""

    text: str
    kind: str  # "store", "humaneval", a name of FORMATS or QUESTIONS, or a name of FAMILIES
    path: Path | None = None
    size: int = 0
    generates: bool = False  # the model writes the answer, else likelihoods are compared

    @property
    def is_code(self) -> bool:
        return self.kind == CODE

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
    outcomes: Mapping[str, int] = field(default_factory=dict)  # of programs, how often each came
    cut: int = 0  # examples whose context did not fit into the model and lost its beginning

    def as_dict(self) -> dict[str, Any]:
        """Return the result for --json."""
        of_groups = {name: {"examples": n, "figures": as_dicts(found)} for name, (n, found) in self.groups.items()}
        own = {"task": self.task, "kind": self.kind, "examples": self.examples, "figures": as_dicts(self.figures)}
        return (
            own
            | ({"groups": of_groups} if of_groups else {})
            | ({"outcomes": dict(self.outcomes)} if self.outcomes else {})
            | ({"cut": self.cut} if self.cut else {})
        )


def parse_task(text: str) -> TaskName:
    """Read the name of a task. Raises ConfigError that lists what would be valid."""
    name, _, rest = text.partition("=")
    made = _made_problems(text, rest if name == "generate" and rest else text)
    if rest and name in FORMATS:
        return TaskName(text, name, Path(rest))
    if rest and name == "generate" and (made or not Path(rest).suffix):
        return replace(made or _raise_unknown(text), generates=True)
    if rest and name in QUESTIONS:
        return TaskName(text, name, Path(rest), generates=True)
    if text == CODE or (rest and name == CODE):
        return TaskName(text, CODE, Path(rest) if rest else None)
    path = Path(text)
    if made or not path.suffix or (rest and re.fullmatch(r"\w+", name) and not path.exists()):
        return made or _raise_unknown(text)
    return TaskName(text, "store" if path.suffix in STORE_SUFFIXES else "own", path)


def _raise_unknown(text: str) -> NoReturn:
    meant = f"; did you mean {near}?" if (near := _meant(text)) else ""
    raise ConfigError(
        f"{shown(text)} is no task{meant or ';'} valid: a token store (.h5), a file of examples (.jsonl), FORMAT=FILE "
        f"with FORMAT one of {', '.join((*FORMATS, *QUESTIONS))}, or made problems: {', '.join(FAMILIES)}, with a size "
        "as in sort:8; generate=sort:8 has their answers written; humaneval has programs written and run"
    )


def _meant(text: str) -> str:
    """Return the task that is nearest to a mistyped one, "" if none is."""
    front, equals, rest = text.partition("=")
    if equals and front not in QUESTIONS:
        near = closest(front, (*FORMATS, *QUESTIONS, CODE))
        return f"{near}={rest}" if near else ""
    name, _, size = (rest if equals else front).partition(":")
    near = closest(name, FAMILIES if equals else (*FAMILIES, CODE))
    of_size = f":{size if size.isdecimal() else FAMILIES[near].sizes[1]}" if near in FAMILIES else ""
    return f"{front + equals if equals else ''}{near}{of_size}" if near else ""


def _made_problems(text: str, name: str) -> TaskName | None:
    """Read the name of problems that are made; None if it is none. Raises ConfigError for a size that there is not."""
    found = re.fullmatch(r"([a-z]+)(?::([0-9]{1,6}))?", name)
    if not found or found[1] not in FAMILIES:
        return None
    size = int(found[2]) if found[2] else FAMILIES[found[1]].sizes[1]
    check_size(found[1], size)
    return TaskName(text, found[1], size=size)


def examples_of(task: TaskName, options: Options) -> list[Example]:
    """Read or make the examples of a task that is no store and does not generate. Not collective. Raises UserError."""
    if task.path is None:
        return [with_shots(each, shots) for each, shots in _made(task, options)]
    return [with_shots(each, shots) for each, shots in _of_file(task, task.path, options, FORMATS)]


def questions_of(task: TaskName, options: Options) -> list[Question]:
    """Read or make the questions of a task that generates. Not collective. Raises UserError."""
    if task.path is None:
        made = _made(task, options)
        return [with_shots(Question(each.contexts[0], (each.choices[0],)), shots) for each, shots in made]
    return [with_shots(each, shots) for each, shots in _of_file(task, task.path, options, QUESTIONS)]


def _made(task: TaskName, options: Options) -> Iterator[tuple[Example, Sequence[Example]]]:
    """Yield problems, and the shots of each, from the part that is never measured."""
    for number, each in enumerate(problems(task.kind, task.size, options.problems, options.seed)):
        seed = seed_of(options.seed, number)
        yield each, problems(task.kind, task.size, options.shots, seed, "train") if options.shots else []


def _of_file(
    task: TaskName, path: Path, options: Options, formats: Mapping[str, Format[Item]]
) -> Iterator[tuple[Item, Sequence[AnyExample]]]:
    """Yield the first rows of a file, and the shots of each."""
    rows = read_examples(path, task.kind, formats)
    source = read_examples(options.shots_from, task.kind, formats) if options.shots_from else rows
    drawing = Drawing(source, str(options.shots_from or task.text))
    for number, each in enumerate(_checked(task, rows[: options.limit])):
        yield each, drawing.draw(each, options.shots, f"{options.seed}:{number}") if options.shots else []


def _checked(task: TaskName, examples: list[Item]) -> list[Item]:
    """Return the examples. Raises DataError for too many groups."""
    if (groups := len({example.group for example in examples})) > MOST_GROUPS:
        raise DataError(f"{task.text} has {groups:,} groups; valid: up to {MOST_GROUPS:,}")
    return examples


def result_of(task: TaskName, examples: Sequence[Example], scores: Sequence[Score]) -> Result:
    """Make the figures of a task from the scores of all choices, in order."""
    rows, start = [], 0
    for example in examples:
        rows.append(_row(example, scores[start : start + len(example.choices)]))
        start += len(example.choices)
    return result_of_rows(task, examples, rows)


def result_of_rows(
    task: TaskName, examples: Sequence[Example | Question], rows: Sequence[Mapping[str, float]]
) -> Result:
    """Make the figures of a task from what was measured of each example."""
    by_group: dict[str, list[Mapping[str, float]]] = {}
    for example, row in zip(examples, rows, strict=True):
        by_group.setdefault(example.group, []).append(row)
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
    if "loss" in found and "acc_norm" not in found:
        found["perplexity"] = exponential(found["loss"])
    return found
