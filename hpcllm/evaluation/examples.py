"""Examples of a task, as text and as tokens to be scored.

    {"context": "The sky is", "choices": ["blue", "loud"], "answer": 0}     which choice is the likeliest?
    {"context": "2 + 2 =", "answer": "4"}                                   is each token of the answer the likeliest?

A continuation is the delimiter, a space unless the example says otherwise, and the choice. Context and continuation
meet as in lm-evaluation-harness 0.4 (its _encode_pair): white space at the end of a context goes over to
the continuation, both are encoded as one text, and what lies behind the tokens of the context alone is the
continuation. An empty context is the token that texts begin with.

The second kind is exact match by greedy generation in one forward pass: if each token of the answer is the likeliest
one after those before it, greedy generation writes the answer, and otherwise it leaves it at the first that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Request
from hpcllm.system.text import printable

SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Example:
    """A question with its answer. One choice: it is the answer, and is to be the likeliest text."""

    contexts: tuple[str, ...]  # one, or one a choice
    choices: tuple[str, ...]  # none is empty
    answer: int = 0  # the choice that is right
    group: str = ""  # figures are given by group, too
    delimiter: str = " "

    @property
    def is_choice(self) -> bool:
        """True if one of several choices is right."""
        return len(self.choices) > 1

    @property
    def shown(self) -> str:
        """Return the context with the right answer."""
        return "".join(self.pairs()[self.answer])

    def pairs(self) -> list[tuple[str, str]]:
        """Return context and continuation of each choice."""
        contexts = self.contexts if len(self.contexts) > 1 else self.contexts * len(self.choices)
        return [(context, self.delimiter + choice) for context, choice in zip(contexts, self.choices, strict=True)]


def requests_of(examples: Sequence[Example], encoder: Encoder, vocabulary: int) -> list[Request]:
    """Encode all choices of all examples, in order. vocabulary: of the model.

    Raises DataError for a continuation that has no token of its own, and for tokens that the model does not have.
    """
    pairs = [pair for example in examples for pair in example.pairs()]
    return requests_of_pairs(pairs, encoder, vocabulary)


def requests_of_pairs(pairs: Sequence[tuple[str, str]], encoder: Encoder, vocabulary: int) -> list[Request]:
    """Encode pairs of context and continuation. Raises what requests_of raises."""
    moved = [_moved(*pair) for pair in pairs]
    contexts = dict.fromkeys(context for context, _ in moved)  # choices share theirs
    known = dict(zip(contexts, _encoded(encoder, list(contexts)), strict=True))
    wholes = _encoded(encoder, [context + continuation for context, continuation in moved])
    beginning = encoder.beginning
    found = []
    for (context, continuation), whole in zip(moved, wholes, strict=True):
        length = len(known[context])
        found.append(Request((beginning + known[context]) or (encoder.end_of_text,), whole[length:]))
        if not found[-1].continuation:
            raise DataError(f"{_shown(continuation)} has no token of its own after {_shown(context[-20:])}")
    largest = max((max(*request.context, *request.continuation) for request in found), default=0)
    if largest >= vocabulary:
        raise DataError(f"the tokenizer makes token {largest} of a text, the model has {vocabulary} tokens")
    return found


def _moved(context: str, continuation: str) -> tuple[str, str]:
    """Move white space at the end of a context to the continuation."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _encoded(encoder: Encoder, texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(ids[:-1].tolist()) for ids in encoder.encode(texts)]  # encode closes a document


def _shown(text: str) -> str:
    short = printable(text[:SHOWN_CHARACTERS])
    return f"'{short}{'...' if len(text) > SHOWN_CHARACTERS else ''}'"
