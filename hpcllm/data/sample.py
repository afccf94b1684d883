"""A sample of the training documents that is the same for any number of ranks: those of the smallest split keys.

    each rank, while it reads      the texts of its smallest keys, SAMPLE_BYTES of them at most   (a heap)
    all ranks                      bisect for the key up to which all texts together hold SAMPLE_BYTES
    rank 0                         receives those texts in document order

Keys are uniform over documents, so the smallest are a fair sample. A document's place in it depends on its key and on
the bytes of smaller keys, never on who read it. No rank holds more than SAMPLE_BYTES and one text.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.data.exchange import gather_array

SAMPLE_BYTES = 32 * 2**20
PIECE_CHARACTERS = 2**20  # what a long document gives to the sample: its beginning


class SmallestKeys:
    """One rank's candidates: (key, document index, text), the largest keys dropped once the rest suffices."""

    def __init__(self, enough_bytes: int = SAMPLE_BYTES) -> None:
        self._enough_bytes = enough_bytes
        self._bytes = 0
        self._heap: list[tuple[int, int, bytes]] = []  # keys negated: the largest on top
        self._seen: set[int] = set()

    def offer(self, key: int, index: int, text: str) -> None:
        """Equal documents have equal keys: only the first of them may count, or the sum of bytes would lie."""
        full = self._bytes >= self._enough_bytes
        if key in self._seen or (full and key > -self._heap[0][0]):
            return
        data = text[:PIECE_CHARACTERS].encode("utf-8")
        heapq.heappush(self._heap, (-key, index, data))
        self._seen.add(key)
        self._bytes += len(data)
        while self._bytes - len(self._heap[0][2]) >= self._enough_bytes:
            key_out, _, data_out = heapq.heappop(self._heap)
            self._seen.remove(-key_out)
            self._bytes -= len(data_out)

    def gather(self, first: NDArray[np.bool_], comm: MPI.Intracomm) -> list[str]:
        """The sample on rank 0 in document order, an empty list elsewhere. Collective over comm.

        first: for each document index of this rank, whether it is the first of its kind over all ranks.
        """
        mine = sorted((index, -key, data) for key, index, data in self._heap if first[index])
        limit = _enough_key([(key, len(data)) for _, key, data in mine], self._enough_bytes, comm)
        chosen = [data for _, key, data in mine if key <= limit]
        lengths = gather_array(np.array([len(data) for data in chosen], np.int64), comm)
        joined = gather_array(np.frombuffer(b"".join(chosen), np.uint8), comm)
        return list(_cut(joined.tobytes(), lengths)) if comm.rank == 0 else []


def _enough_key(keys_and_bytes: list[tuple[int, int]], enough_bytes: int, comm: MPI.Intracomm) -> int:
    """The smallest key up to which all ranks together hold `enough_bytes`; 2^64 - 1 if they never do."""
    ordered = np.array([key for key, _ in sorted(keys_and_bytes)], np.uint64)
    held = np.cumsum([0, *(size for _, size in sorted(keys_and_bytes))])
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        mine = int(held[np.searchsorted(ordered, np.uint64(middle), side="right")])
        low, high = (low, middle) if comm.allreduce(mine) >= enough_bytes else (middle + 1, high)
    return low


def _cut(joined: bytes, lengths: NDArray[np.int64]) -> Iterator[str]:
    start = 0
    for length in lengths.tolist():
        yield joined[start : start + length].decode("utf-8")
        start += length
