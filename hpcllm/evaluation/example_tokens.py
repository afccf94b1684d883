"""Examples and prompts -> tokens.

    context | delimiter + choice      "2 + 2 = " | "4"  -->  "2 + 2 =" | " 4"  -->  tokens of the one | the rest
    prompt                            as texts begin, all of it

Context and continuation meet as in lm-evaluation-harness 0.4 (its _encode_pair): white space at the end of a context
goes over to the continuation, both are encoded as one text, and what lies behind the tokens of the context alone is the
continuation. An empty text is the token that texts begin with, or end with.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Request, Tokens
from hpcllm.evaluation.examples import Example
from hpcllm.system.text import printable

SHOWN_CHARACTERS = 40


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


def prompts_of(texts: Sequence[str], encoder: Encoder, vocabulary: int) -> list[Tokens]:
    """Encode prompts as texts begin. Raises DataError for a token that the model does not have."""
    found = [encoder.beginning + tuple(ids[:-1].tolist()) for ids in encoder.encode(texts)]  # encode closes a document
    largest = max((max(ids, default=0) for ids in found), default=0)
    if largest >= vocabulary:
        raise DataError(f"the tokenizer makes token {largest} of a text, the model has {vocabulary} tokens")
    return [ids or (encoder.end_of_text,) for ids in found]
