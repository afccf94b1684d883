r"""Questions that a model answers by writing: where its text ends, what of it is the answer, when that is right.

prompt --generate, up to a stop string--> text --pattern--> answer --compare--> right or not

{"prompt": "2 + 2 =", "answer": "4"}                                    the first line, as it is
{"prompt": "...", "answer": "1200", "stop": ["\n\n"],
 "pattern": "-?[0-9.,]+", "compare": "number"}                          the last number of the first paragraph

compare    left aside on both sides, as by lm-evaluation-harness 0.4
text       white space at both ends
number     also commas, dollar signs, a full stop at the end, upper and lower case
words      also punctuation, articles, upper and lower case
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Compare = Literal["text", "number", "words"]
COMPARISONS: tuple[Compare, ...] = get_args(Compare)
_IN_NUMBERS = re.compile(r",|\$|\.$")
_ARTICLES = re.compile(r"\b(?:the|an|a) ", re.IGNORECASE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Reading:
    """A way to find the answer in a text: the last match of a pattern, or its first; its first group that is there."""

    figure: str  # the share of right answers that are found this way
    pattern: str = ""  # a regular expression; "": all of the text
    last: bool = True


@dataclass(frozen=True)
class Question:
    """A prompt with the answers that are right."""

    prompt: str
    answers: tuple[str, ...]  # any of them
    stops: tuple[str, ...] = ("\n",)
    readings: tuple[Reading, ...] = (Reading("exact_match"),)
    compare: Compare = "text"
    group: str = ""  # figures are given by group, too
    solution: str = ""  # what stands behind the prompt where it is shown with its answer; "": the first answer

    @property
    def shown(self) -> str:
        """Return the prompt with its answer."""
        return f"{self.prompt} {self.solution or self.answers[0]}"

    def is_right(self, found: str | None) -> bool:
        """Compare what was found in a text, None for nothing, with the answers."""
        return found is not None and plain(found, self.compare) in {plain(each, self.compare) for each in self.answers}


def plain(answer: str, compare: Compare) -> str:
    """Leave aside of an answer what does not count."""
    if compare == "number":
        return _IN_NUMBERS.sub("", answer.strip()).strip().lower()
    if compare == "words":
        return _ARTICLES.sub("", answer).lower().translate(_PUNCTUATION).strip()
    return answer.strip()


def rights(questions: Sequence[Question], found: Sequence[Sequence[str | None]]) -> list[dict[str, float]]:
    """Return 0 or 1 for each reading of each question. found: by questions, then readings; None: no match."""
    return [
        {reading.figure: float(question.is_right(each)) for reading, each in zip(question.readings, row, strict=True)}
        for question, row in zip(questions, found, strict=True)
    ]
