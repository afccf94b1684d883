"""Rows of training samples: which pieces of which documents stand in each row of `sequence_length` inputs.

    documents      aaaaaaa bbb ccccc dddd          (each ends with an end of text)

    stream         aaaaaa|abbbcc|cccddd            row k = tokens[k T .. k T + T], wherever documents end
    best-fit       aaaaaa|ccccbb|ddd...            whole documents, the longest first, each into the fullest row that
                                                   has room; longer ones are cut; the tail of a row does not count

The target of an input is the token after it. With a document mask positions restart with each piece, and a target that
begins a document does not count: it would be predicted from another text. A token whose bit in `counted` is 0 is no
target either. Where best-fit packing is used, the last token of a document is a target only.

Best-fit packing is made a window of consecutive documents at a time: enough of them for about WINDOW_ROWS rows. The
rows of each window are counted once, at the start, by all ranks together; a row is found from its number by a search in
their sums and packing its window again. So the state of a run's data stays one integer, and no rank keeps a list of
documents. Best-fit decreasing: Johnson 1973, "Near-optimal bin packing algorithms"; for training: arXiv:2404.10830.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.data.store import Split, TokenStore, flags_of
from hpcllm.model.loss import IGNORED
from hpcllm.mpi.partition import chunk_range

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW_ROWS = 32  # that best-fit packing fills at a time, about: of these one is left half empty


class Piece(NamedTuple):
    """Part of a document in a row: inputs tokens[start : start + inputs], whose first `targets` targets count."""

    start: int
    inputs: int
    targets: int


@dataclass(frozen=True)
class SplitArrays:
    """Arrays of one split of a token store."""

    tokens: NDArray[np.integer]
    documents: NDArray[np.integer]  # (documents + 1,): where each begins, and the end of the last
    counted: NDArray[np.uint8] | None = None  # bit i % 8 of byte i // 8: token i counts as a target; None: all do

    @classmethod
    def of(cls, store: TokenStore, split: Split) -> SplitArrays:
        """Take the arrays of a split from an open store."""
        return cls(store.tokens(split), store.documents(split), store.counted(split))

    def counts(self, start: int, tokens: int) -> NDArray[np.bool_]:
        """Return (tokens,) bool: those from `start` on that count as targets."""
        return np.ones(tokens, np.bool_) if self.counted is None else flags_of(self.counted, start, start + tokens)


class Rows(Protocol):
    """Rows of one split, each a list of pieces; pairs.py has further ones."""

    @property
    def split(self) -> SplitArrays:
        """Arrays that the pieces are cut from."""

    @property
    def sequence(self) -> int:
        """Inputs of a row."""

    @property
    def masked(self) -> bool:
        """True if pieces do not see each other."""

    @property
    def count(self) -> int:
        """Number of rows."""

    def first_token(self, row: int) -> int:
        """Return where in the split a row begins."""

    def pieces(self, row: int) -> list[Piece]:
        """List the pieces of a row, in order; what they leave free is its tail."""


@dataclass(frozen=True)
class StreamRows:
    """Rows of consecutive tokens; documents run on over their ends."""

    split: SplitArrays
    sequence: int
    masked: bool  # documents do not see each other

    @property
    def count(self) -> int:
        return sample_count(len(self.split.tokens), self.sequence)

    def first_token(self, row: int) -> int:
        return row * self.sequence

    def pieces(self, row: int) -> list[Piece]:
        """List the pieces of a row, in order."""
        start, end = row * self.sequence, (row + 1) * self.sequence
        if not self.masked:
            return [Piece(start, self.sequence, self.sequence)]
        documents = self.split.documents
        first, last = (int(np.searchsorted(documents, token, "right")) for token in (start, end))
        borders = documents[first:last].tolist()  # start < border <= end: the first input after it, or the last target
        starts = [start, *(border for border in borders if border < end)]
        ends = [*starts[1:], end]
        cut = set(borders)
        return [Piece(a, b - a, b - a - (b in cut)) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, eq=False)
class BestFitRows:
    """Rows of whole documents. ends: (windows,) int64, the number of rows in all windows up to and with each."""

    split: SplitArrays
    sequence: int
    masked: bool
    window: int  # documents
    ends: NDArray[np.int64] = field(repr=False)

    @property
    def count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def first_token(self, row: int) -> int:
        return self.pieces(row)[0].start

    def pieces(self, row: int) -> list[Piece]:
        """List the pieces of a row, in order; what they leave free is the tail."""
        window = int(np.searchsorted(self.ends, row, "right"))
        rows = _rows_of_window(self, window)
        return rows[row - int(self.ends[window]) + len(rows)]


def make_rows(
    split: SplitArrays,
    sequence: int,
    packing: Literal["stream", "best-fit"],
    masked: bool,
    comm: MPI.Intracomm | None = None,
) -> Rows:
    """Prepare the rows of a split. Collective over comm, whose ranks share the counting; None: one process."""
    if packing == "stream":
        return StreamRows(split, sequence, masked)
    documents = len(split.documents) - 1
    window = max(1, -(-WINDOW_ROWS * sequence * documents // max(1, len(split.tokens))))
    windows = -(-documents // window)
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    mine = [len(_pack(_whole(split, window, w), sequence)) for w in range(*chunk_range(windows, size, rank))]
    counts = [count for part in (comm.allgather(mine) if comm else [mine]) for count in part]
    return BestFitRows(split, sequence, masked, window, np.cumsum(counts, dtype=np.int64))


class HostBatch(NamedTuple):
    """Rows laid out. inputs, targets, positions: the planes of `planes`, (3, rows, sequence) int64."""

    planes: NDArray[np.int64]
    lengths: list[NDArray[np.int64]]  # of the pieces of each row, its tail the last of them
    numbers: Sequence[int | None]  # of the rows

    @property
    def counted(self) -> int:
        """Number of targets that count."""
        return int(np.count_nonzero(self.planes[1] != IGNORED))

    @property
    def tokens(self) -> NDArray[np.int64]:
        """(rows, 2, sequence): inputs and targets of each row."""
        return np.ascontiguousarray(self.planes[:2].swapaxes(0, 1))


def read_batch(rows: Rows, numbers: Sequence[int | None]) -> HostBatch:
    """Lay out the rows of these numbers; None: a row without a target that counts."""
    planes = np.zeros((3, len(numbers), rows.sequence), np.int64)
    planes[1] = IGNORED
    lengths = [_lay_out(rows, number, planes[:, at]) for at, number in enumerate(numbers)]
    return HostBatch(planes, lengths, numbers)


def read_samples(rows: Rows, sampler: Sampler, position: int, count: int) -> HostBatch:
    """Lay out samples position .. position + count - 1 of the run."""
    return read_batch(rows, [sampler.index(position + at) for at in range(count)])


def _lay_out(rows: Rows, number: int | None, planes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fill (3, sequence) with a row; returns the lengths of its pieces."""
    (inputs, targets, positions), at, split = planes, 0, rows.split
    lengths = []
    for start, length, counted in [] if number is None else rows.pieces(number):
        inputs[at : at + length] = split.tokens[start : start + length]
        counts = split.counts(start + 1, counted)
        targets[at : at + counted][counts] = split.tokens[start + 1 : start + 1 + counted][counts]
        lengths.append(length)
        at += length
    lengths += [rows.sequence - at] if at < rows.sequence else []
    if not rows.masked:
        lengths = [rows.sequence]
    found = np.array(lengths, np.int64)
    positions[:] = np.arange(rows.sequence) - np.repeat(np.cumsum(found) - found, found)
    return found


def _whole(split: SplitArrays, window: int, number: int) -> NDArray[np.int64]:
    """Borders of the documents of a window."""
    return np.asarray(split.documents[number * window : (number + 1) * window + 1], np.int64)


@lru_cache(maxsize=16)
def _rows_of_window(rows: BestFitRows, number: int) -> list[list[Piece]]:
    return _pack(_whole(rows.split, rows.window, number), rows.sequence)


def _pack(borders: NDArray[np.int64], sequence: int) -> list[list[Piece]]:
    """Pack documents, of which all but the last token are inputs, into rows: best-fit decreasing."""
    starts, lengths = borders[:-1], np.diff(borders) - 1
    rows = [
        [Piece(start + at, sequence, sequence)]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for at in range(0, length - length % sequence, sequence)
    ]
    rest = lengths % sequence
    starts = starts + lengths - rest
    room: list[tuple[int, int]] = []  # free inputs and number of the rows that have some, sorted
    for item in np.argsort(-rest, kind="stable").tolist():
        length = int(rest[item])
        if not length:
            break
        place = bisect.bisect_left(room, (length, 0))
        free, row = room.pop(place) if place < len(room) else (sequence, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(Piece(int(starts[item]), length, length))
        if free > length:
            bisect.insort(room, (free - length, row))
    return rows
