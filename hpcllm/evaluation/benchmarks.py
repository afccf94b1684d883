"""Rows of benchmark files as they are handed round -> examples, worded as lm-evaluation-harness 0.4 words them.

    own          {"context", "choices", "answer"} or {"context", "answer"}, with "group" and "delimiter" if they like
    arc          question or {"stem", "choices"}, choices {"text", "label"}, answerKey                (openbookqa: also)
    blimp        sentence_good, sentence_bad
    boolq        passage, question, label or answer
    hellaswag    activity_label, ctx_a, ctx_b, endings, label
    lambada      text: its last word is the answer
    mmlu         question, choices, answer, subject
    piqa         goal, sol1, sol2, label
    sciq         support, question, correct_answer, distractor1 to distractor3
    winogrande   sentence, option1, option2, answer

Each function takes one row, whose values may be of any type, and raises RejectedError, whose text says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.questions import Question

Item = TypeVar("Item", Example, Question)
Row = Mapping[str, Any]
MOST_CHOICES = 100


class RejectedError(Exception):
    """A row that makes no example; the text says why."""


def own(row: Row) -> Example:
    """Read a row of our own schema."""
    context = row.get("context")
    contexts = tuple(strings_of(row, "context")) if isinstance(context, list) else (text_of(row, "context"),)
    delimiter, group = (text_of(row, key) if row.get(key) is not None else None for key in ("delimiter", "group"))
    more = {"group": group or "", "delimiter": " " if delimiter is None else delimiter}
    if row.get("choices") is None:
        return _example(contexts, [text_of(row, "answer")], 0, **more)
    return _example(contexts, strings_of(row, "choices"), _index(row, "answer"), **more)


def arc(row: Row) -> Example:
    """Read a row of ARC, as published or in columns."""
    stem, choices, context = _question(row)
    return _labelled(row, f"Question: {stem}\nAnswer:", choices, context)


def openbookqa(row: Row) -> Example:
    """Read a row of OpenBookQA, as published or in columns."""
    stem, choices, context = _question(row)
    return _labelled(row, stem, choices, context)


def blimp(row: Row) -> Example:
    """Read a minimal pair: a sentence and one that is wrong."""
    group = row.get("UID")
    texts = [text_of(row, "sentence_good"), text_of(row, "sentence_bad")]
    return _example(("",), texts, 0, group=group if isinstance(group, str) else "")


def boolq(row: Row) -> Example:
    """Read a question that is answered by yes or no."""
    label = row.get("label", row.get("answer"))
    if label not in (0, 1, "0", "1"):  # True and False are 1 and 0
        raise RejectedError("label or answer is neither true nor false")
    context = f"{text_of(row, 'passage')}\nQuestion: {text_of(row, 'question')}?\nAnswer:"
    return _example((context,), ["no", "yes"], int(label))


def hellaswag(row: Row) -> Example:
    """Read a beginning with four endings."""
    context = f"{text_of(row, 'activity_label')}: {text_of(row, 'ctx_a')} {text_of(row, 'ctx_b').capitalize()}"
    endings = [_without_brackets(ending) for ending in strings_of(row, "endings")]
    return _example((_without_brackets(context),), endings, _index(row, "label"))


def lambada(row: Row) -> Example:
    """Read a passage whose last word is to be found."""
    context, space, word = text_of(row, "text").rpartition(" ")
    if not (context and space and word):
        raise RejectedError("text has no last word behind a space")
    return _example((context,), [word], 0)


def mmlu(row: Row) -> Example:
    """Read a question with the choices A to D."""
    choices, answer = strings_of(row, "choices"), row.get("answer")
    if len(choices) != 4:
        raise RejectedError(f"{len(choices)} choices; valid: 4")
    group = row.get("subject")
    lines = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    index = "ABCD".index(answer) if answer in ("A", "B", "C", "D") else _index(row, "answer")
    context = f"{text_of(row, 'question').strip()}{lines}\nAnswer:"
    return _example((context,), list("ABCD"), index, group=group if isinstance(group, str) else "")


def piqa(row: Row) -> Example:
    """Read a goal with two ways to reach it."""
    context = f"Question: {text_of(row, 'goal')}\nAnswer:"
    return _example((context,), [text_of(row, "sol1"), text_of(row, "sol2")], _index(row, "label"))


def sciq(row: Row) -> Example:
    """Read a question with its support and three distractors."""
    texts = [text_of(row, key) for key in ("distractor1", "distractor2", "distractor3", "correct_answer")]
    context = f"{text_of(row, 'support').lstrip()}\nQuestion: {text_of(row, 'question')}\nAnswer:"
    return _example((context,), texts, 3)


def winogrande(row: Row) -> Example:
    """Read a sentence with a gap: what stands behind the gap is scored after each way to fill it."""
    before, gap, after = text_of(row, "sentence").partition("_")
    if not gap or not after.strip():
        raise RejectedError("sentence has no gap '_' with text behind it")
    if row.get("answer") not in ("1", "2", 1, 2):
        raise RejectedError("answer is neither 1 nor 2")
    contexts = tuple(before + text_of(row, option) for option in ("option1", "option2"))
    return _example(contexts, [after.strip()] * 2, int(row["answer"]) - 1)


@dataclass(frozen=True)
class Format(Generic[Item]):
    """A kind of rows: the function that reads one, and the columns that it looks at in a table."""

    read: Callable[[Row], Item]
    columns: tuple[str, ...]


FORMATS = {
    "own": Format(own, ("context", "choices", "answer", "group", "delimiter")),
    "arc": Format(arc, ("question", "choices", "answerKey")),
    "blimp": Format(blimp, ("sentence_good", "sentence_bad", "UID")),
    "boolq": Format(boolq, ("passage", "question", "label", "answer")),
    "hellaswag": Format(hellaswag, ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "lambada": Format(lambada, ("text",)),
    "mmlu": Format(mmlu, ("question", "choices", "answer", "subject")),
    "openbookqa": Format(openbookqa, ("question", "question_stem", "choices", "answerKey")),
    "piqa": Format(piqa, ("goal", "sol1", "sol2", "label")),
    "sciq": Format(sciq, ("support", "question", "correct_answer", "distractor1", "distractor2", "distractor3")),
    "winogrande": Format(winogrande, ("sentence", "option1", "option2", "answer")),
}


def _example(contexts: tuple[str, ...], choices: list[str], answer: int, **more: str) -> Example:
    if not choices or len(choices) > MOST_CHOICES:
        raise RejectedError(f"{len(choices)} choices; valid: 1 to {MOST_CHOICES}")
    if not all(choices):
        raise RejectedError("a choice is empty")
    if not 0 <= answer < len(choices):
        raise RejectedError(f"the answer is choice {answer}; valid: 0 to {len(choices) - 1}")
    if len(contexts) not in (1, len(choices)):
        raise RejectedError(f"{len(contexts)} contexts for {len(choices)} choices; valid: one, or one a choice")
    return Example(contexts, tuple(choices), answer, **more)


def text_of(row: Row, key: str) -> str:
    """Return a string of a row. Raises RejectedError."""
    value = row.get(key)
    if not isinstance(value, str):
        raise RejectedError(f"{key} is {_kind(value)}; valid: a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RejectedError(f"{key} is not Unicode") from error
    return value


def strings_of(row: Row, key: str) -> list[str]:
    """Return a list of strings of a row. Raises RejectedError."""
    value = row.get(key)
    if not isinstance(value, list | tuple):
        raise RejectedError(f"{key} is {_kind(value)}; valid: a list of strings")
    return [text_of({key: each}, key) for each in value]


def _index(row: Row, key: str) -> int:
    value = row.get(key)
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}", value):
        value = int(value)
    if type(value) is not int:  # True is an int too
        raise RejectedError(f"{key} is {_kind(value)}; valid: the number of a choice, from 0")
    return value


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _question(row: Row) -> tuple[str, list[str], list[str]]:
    """Return question, texts and labels of the choices; both ways in which they are published."""
    question = row.get("question")
    inner: Row = question if isinstance(question, dict) else {}
    key = "stem" if inner else "question_stem" if "question_stem" in row else "question"
    choices = (inner or row).get("choices")
    if isinstance(choices, list) and all(isinstance(each, dict) for each in choices):
        choices = {key: [each.get(key) for each in choices] for key in ("text", "label")}
    if not isinstance(choices, dict):
        raise RejectedError(f"choices is {_kind(choices)}; valid: texts and labels")
    return text_of(inner or row, key), strings_of(choices, "text"), strings_of(choices, "label")


def _labelled(row: Row, context: str, choices: list[str], labels: list[str]) -> Example:
    answer = text_of(row, "answerKey").strip()
    if answer not in labels or len(labels) != len(choices):
        raise RejectedError("answerKey is no label of a choice")
    return _example((context,), choices, labels.index(answer))


def _without_brackets(text: str) -> str:
    """Take out what a source of HellaSwag has left in brackets, as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
