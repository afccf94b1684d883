r"""Rows of files of questions -> questions, worded and compared as by lm-evaluation-harness 0.4.

    generate     {"prompt", "answer"}, with "stop", "pattern", "compare", "group" if they like (questions.py)
    gsm8k        question, answer: its last line is "#### 1,200"        exact_match: the number behind the first ####
                                                                        flexible_match: the last number of the text
    nq_open      question, answer: texts that are right                 to the end of the line or sentence
    triviaqa     question, answer: {"aliases"}, or texts                the same

A row of our own may have any number of answers, as a list. Each function takes one row, whose values may be of any
type, and raises RejectedError.
"""

from __future__ import annotations

from typing import Any

from hpcllm.evaluation.benchmarks import Format, RejectedError, Row, strings_of, text_of
from hpcllm.evaluation.patterns import fault_of
from hpcllm.evaluation.questions import COMPARISONS, Question, Reading

MOST_ANSWERS = 1000
MOST_STOPS = 16
GSM8K = (
    Reading("exact_match", r"#### (\-?[0-9\.\,]+)", last=False),
    Reading("flexible_match", r"(-?[$0-9.,]{2,})|(-?[0-9]+)"),
)


def own(row: Row) -> Question:
    """Read a row of our own schema."""
    pattern, group, compare = (text_of(row, key) if row.get(key) is not None else "" for key in OPTIONAL)
    if fault := fault_of(pattern):
        raise RejectedError(f"pattern: {fault}")
    if (compare or "text") not in COMPARISONS:
        raise RejectedError(f"compare is none of {', '.join(COMPARISONS)}")
    return Question(
        text_of(row, "prompt"),
        _answers(row.get("answer")),
        _stops(row),
        (Reading("exact_match", pattern),),
        next(name for name in COMPARISONS if name == (compare or "text")),
        group,
    )


def gsm8k(row: Row) -> Question:
    """Read a row of GSM8K: the answer is worked, its number stands behind ####."""
    worked, question = text_of(row, "answer"), text_of(row, "question")
    _, mark, number = worked.rpartition("#### ")
    if not (mark and number.strip()):
        raise RejectedError("answer has no number behind '#### '")
    stops = ("Question:", "</s>", "<|im_end|>")
    prompt = f"Question: {question}\nAnswer:"
    return Question(prompt, (number,), stops, GSM8K, "number", solution=worked)


def nq_open(row: Row) -> Question:
    """Read a row of Natural Questions, open domain."""
    prompt = f"Q: {text_of(row, 'question')}?\nA:"
    return Question(prompt, _answers(row.get("answer")), ("\n", ".", ","), compare="words")


def triviaqa(row: Row) -> Question:
    """Read a row of TriviaQA."""
    answer = row.get("answer")
    found = answer.get("aliases") if isinstance(answer, dict) else answer
    prompt = f"Question: {text_of(row, 'question')}?\nAnswer:"
    return Question(prompt, _answers(found), ("\n", ".", ","), compare="words")


OPTIONAL = ("pattern", "group", "compare")
QUESTIONS = {
    "generate": Format(own, ("prompt", "answer", "stop", *OPTIONAL)),
    "gsm8k": Format(gsm8k, ("question", "answer")),
    "nq_open": Format(nq_open, ("question", "answer")),
    "triviaqa": Format(triviaqa, ("question", "answer")),
}


def _answers(value: Any) -> tuple[str, ...]:
    """Return the answers that are right; a text is the only one."""
    found = tuple(strings_of({"answer": [value] if isinstance(value, str) else value}, "answer"))
    if not 0 < len(found) <= MOST_ANSWERS:
        raise RejectedError(f"{len(found):,} answers; valid: 1 to {MOST_ANSWERS:,}")
    if not all(each.strip() for each in found):
        raise RejectedError("an answer is empty")
    return found


def _stops(row: Row) -> tuple[str, ...]:
    """Return the strings that end a text; the end of a line if the row does not say."""
    if (value := row.get("stop")) is None:
        return ("\n",)
    found = tuple(strings_of({"stop": [value] if isinstance(value, str) else value}, "stop"))
    if len(found) > MOST_STOPS or not all(found):
        raise RejectedError(f"stop has an empty text, or more than {MOST_STOPS}; valid: up to {MOST_STOPS} texts")
    return found
