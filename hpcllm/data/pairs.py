"""Rows of preferences: a sample is one pair, its chosen and its rejected document beside each other in one row.

    documents      cccc rrr | ccccccccc rrrrrrr | cc rrrrr      2i chosen, 2i + 1 rejected
    rows           cccrr...                       crrrr...      the pair in the middle does not fit: it is left out

Both sums of log-probabilities that a pair's loss needs are thus in one row, so in one microbatch of one replica. All
but the last token of a document are inputs; the documents do not see each other. A pair of more inputs than a row has
is left out, never cut: without its end an answer is another answer, and nobody has said which of two such is better.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.packing import Piece, SplitArrays
from hpcllm.errors import DataError


@dataclass(frozen=True, eq=False)
class PairRows:
    """Rows of whole pairs. numbers: (rows,) int64, the pair of the split that each row holds."""

    split: SplitArrays
    sequence: int
    numbers: NDArray[np.int64] = field(repr=False)
    masked: bool = True

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def pairs(self) -> int:
        """Number of pairs of the split, with those that are left out."""
        return (len(self.split.documents) - 1) // 2

    def first_token(self, row: int) -> int:
        return int(self.split.documents[2 * self.numbers[row]])

    def pieces(self, row: int) -> list[Piece]:
        """List the two pieces of a row, the chosen one first; what they leave free is the tail."""
        first = 2 * int(self.numbers[row])
        start, middle, end = self.split.documents[first : first + 3].tolist()
        return [Piece(a, b - a - 1, b - a - 1) for a, b in ((start, middle), (middle, end))]


def pair_rows(split: SplitArrays, sequence: int) -> PairRows:
    """Find the pairs of a split that fit into a row. Not collective."""
    inputs = np.diff(split.documents).reshape(-1, 2) - 1
    return PairRows(split, sequence, np.flatnonzero((inputs.sum(1) <= sequence) & (inputs.min(1) > 0)))


def check_any(rows: PairRows) -> None:
    """Raise DataError if no pair fits into a row."""
    if not rows.count:
        raise DataError(
            f"none of {rows.pairs:,} pairs fits into data.sequence_length = {rows.sequence}; raise it, for both "
            "answers of a pair, each with its prompt, are to stand in one row"
        )
