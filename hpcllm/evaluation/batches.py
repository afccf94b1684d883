"""Texts to be scored -> batches of like length. Pure: which tokens meet in a batch follows from the list alone.

    request      context | continuation          the model reads all tokens but the last, the last ones are targets
                 a b c d | e f                   reads  a b c d e    targets       e f
    rows         equal inputs once               a b c d e    serves the continuations "e f" and "e g"
    batches      the longest rows first          rows x longest <= tokens of a batch; shorter rows are filled up behind
                                                 their end, where causal attention does not look

Ranks that share the work get whole batches, so a score has the same bits however many they are. A context that does not
fit is cut at its beginning, as by lm-evaluation-harness 0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.packing import Rows, read_batch
from hpcllm.errors import DataError
from hpcllm.model.loss import IGNORED

BATCH_TOKENS = 4096  # that a batch has at most, unless one row is longer
Tokens = tuple[int, ...]
SourceOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class Request(NamedTuple):
    """A continuation whose likelihood in a context is wanted; both have at least one token."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows that are run forward at once, and the tokens of them that are scored."""

    inputs: NDArray[np.int64]  # (rows, longest)
    places: NDArray[np.int64]  # (targets,): row * longest + column of the input that each target follows
    targets: NDArray[np.int64]  # (targets,)
    owners: NDArray[np.int64]  # (targets,): the request or the row (and source) of the store that each counts for
    lengths: NDArray[np.int64] | None = None  # of documents that do not see each other, row after row; None: a row is 1


def check_lengths(requests: Sequence[Request], max_sequence: int) -> None:
    """Raise DataError for a continuation of more tokens than the model reads, which no context can be cut for."""
    longest = max((len(request.continuation) for request in requests), default=0)
    if longest > max_sequence:
        raise DataError(f"a continuation has {longest:,} tokens; valid: up to {max_sequence:,}, which the model reads")


def batches_of_requests(
    requests: Sequence[Request], max_sequence: int, batch_tokens: int = BATCH_TOKENS
) -> list[Batch]:
    """Lay out requests that check_lengths has let pass. max_sequence: inputs that the model reads at most.

    owners: places in the list.
    """
    by_input: dict[Tokens, list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        inputs = (context + continuation)[-(max_sequence + 1) : -1]
        by_input.setdefault(inputs, []).append(number)
    rows = sorted(by_input, key=lambda row: (-len(row), row))
    return [_lay_out(part, by_input, requests) for part in _parts(rows, batch_tokens)]


def _parts(rows: Sequence[Tokens], batch_tokens: int) -> Iterator[Sequence[Tokens]]:
    """Cut rows that are sorted by length, the longest first."""
    first = 0
    while first < len(rows):
        end = first + max(1, batch_tokens // len(rows[first]))
        yield rows[first:end]
        first = end


def _lay_out(rows: Sequence[Tokens], by_input: dict[Tokens, list[int]], requests: Sequence[Request]) -> Batch:
    longest = len(rows[0])
    inputs = np.zeros((len(rows), longest), np.int64)
    places, targets, owners = [], [], []
    for place, row in enumerate(rows):
        inputs[place, : len(row)] = row
        for number in by_input[row]:
            continuation = requests[number].continuation
            end = place * longest + len(row)
            places.append(np.arange(end - len(continuation), end))
            targets.append(np.array(continuation, np.int64))
            owners.append(np.full(len(continuation), number))
    return Batch(inputs, np.concatenate(places), np.concatenate(targets), np.concatenate(owners))


def batch_of_rows(rows: Rows, first: int, count: int, source_of: SourceOf | None = None, sources: int = 1) -> Batch:
    """Lay out rows first to first + count - 1 of a token store, with the targets and masks of training.

    source_of: numbers, below `sources`, of the sources of tokens of the split, by their places in it; None: one alone.
    owners: row * sources + source of the target.
    """
    found = read_batch(rows, range(first, first + count))
    inputs, targets, _ = found.planes
    places = np.flatnonzero(targets != IGNORED)
    lengths = np.concatenate(found.lengths) if rows.masked else None
    owners = (first + places // rows.sequence) * sources
    if source_of:
        tokens = np.concatenate([_target_tokens(rows, number) for number in range(first, first + count)])
        owners += source_of(tokens[places])
    return Batch(inputs, places, targets.ravel()[places], owners, lengths)


def _target_tokens(rows: Rows, number: int) -> NDArray[np.int64]:
    """Return (sequence,): the place in the split of the target that follows each input; 0 where there is none."""
    found, at = np.zeros(rows.sequence, np.int64), 0
    for piece in rows.pieces(number):
        found[at : at + piece.inputs] = np.arange(piece.start + 1, piece.start + piece.inputs + 1)
        at += piece.inputs
    return found
