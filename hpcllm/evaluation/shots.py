r"""Examples with their answers in front of each question: a few shots, drawn by seed.

    shot   context + delimiter + right choice        of a question: prompt + answer as it is worked
    text   shot \n\n shot \n\n context               where a shot ends with the end of a line, nothing stands between

    file, --shots 2              question 7 sees two others of its file, never its own text
    file, --shots-from FILE      two of that one
    sort:3                       two problems of the part to train on, of which nothing is measured

Which ones question i sees follows from seed and i alone. Where rows have groups, shots come from the group of the
question, if there is one row of it where they come from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from hpcllm.errors import DataError
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.questions import Question

AnyExample = Example | Question


class Drawing:
    """Rows that shots are drawn from, by group; `name` is that of their file."""

    def __init__(self, rows: Sequence[AnyExample], name: str) -> None:
        self.rows, self.name = rows, name
        self.by_group: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            self.by_group.setdefault(row.group, []).append(number)
        self.alike = Counter((row.group, _asked(row)) for row in rows)

    def draw(self, example: AnyExample, count: int, seed: str) -> list[AnyExample]:
        """Draw `count` rows that ask something else than the example. Raises DataError where there are fewer."""
        group = example.group if example.group in self.by_group else None
        numbers = range(len(self.rows)) if group is None else self.by_group[group]
        asked = _asked(example)
        alike = sum(self.alike[each, asked] for each in (self.by_group if group is None else [group]))
        if (left := len(numbers) - alike) < count:
            where = f"the group {group!r} of {self.name}" if group else self.name
            raise DataError(f"{where} has {left} examples to show in front of another; valid: up to {left} shots")
        drawn = random.Random(seed).sample(numbers, count + alike)
        return [row for row in (self.rows[number] for number in drawn) if _asked(row) != asked][:count]


@overload
def with_shots(example: Example, shots: Sequence[AnyExample]) -> Example: ...
@overload
def with_shots(example: Question, shots: Sequence[AnyExample]) -> Question: ...
def with_shots(example: AnyExample, shots: Sequence[AnyExample]) -> AnyExample:
    """Put shots in front of an example."""
    before = "".join(_closed(shot.shown) for shot in shots)
    if isinstance(example, Question):
        return replace(example, prompt=before + example.prompt)
    return replace(example, contexts=tuple(before + context for context in example.contexts))


def _closed(shown: str) -> str:
    return shown if shown.endswith("\n") else f"{shown}\n\n"


def _asked(example: AnyExample) -> str | tuple[str, ...]:
    return example.prompt if isinstance(example, Question) else example.contexts + example.choices
