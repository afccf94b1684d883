"""Pass 1: every document is read once, and what remains of it is its digest, key and size.

documents --> digest        key              bytes         census: 32 bytes a document, in order
                |            |                 |
            first of its   which split?      how much      placement: who stays, in which split, and what of
            kind? (all)    in the sample?    (exscan)      each split lies on the ranks before and on all
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.data.documents import Document, Problem
from hpcllm.data.exchange import Digests, before_and_total, first_occurrences
from hpcllm.data.normal import digest, split_key, validation_keys
from hpcllm.data.report import Problems
from hpcllm.data.sample import SmallestKeys
from hpcllm.data.store import SPLITS, Split


@dataclass
class Census:
    """This rank's documents in order, and the problems met on the way."""

    digests: bytearray = field(default_factory=bytearray)
    keys: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    problems: Problems = field(default_factory=Problems)
    sample: SmallestKeys = field(default_factory=SmallestKeys)

    def digest_array(self) -> Digests:
        """(documents, 2) uint64."""
        return np.frombuffer(bytes(self.digests), np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class Amount:
    documents: int
    bytes: int


@dataclass(frozen=True)
class Placement:
    """Which of this rank's documents stay, in which split, and how much of it lies on the ranks before and on all."""

    stays: NDArray[np.bool_]
    validation: NDArray[np.bool_]
    before: dict[Split, Amount]
    total: dict[Split, Amount]

    def split_of(self, index: int) -> Split:
        return "validation" if self.validation[index] else "train"


def take_census(items: Iterator[Document | Problem], seed: int, validation_fraction: float) -> Census:
    """Read everything once. Not collective."""
    census = Census()
    limit = validation_keys(validation_fraction)
    for item in items:
        if isinstance(item, Problem):
            census.problems.add(item.reason, item.origin)
            continue
        name = digest(item.text)
        key = split_key(name, seed)
        if key >= limit:
            census.sample.offer(key, len(census.keys), item.text)
        census.digests += name
        census.keys.append(key)
        census.sizes.append(item.size_bytes)
    return census


def place(census: Census, validation_fraction: float, comm: MPI.Intracomm) -> Placement:
    """Drop duplicates and count what comes before. Collective over comm."""
    stays = first_occurrences(census.digest_array(), comm)
    keys, sizes = np.array(census.keys, np.uint64), np.array(census.sizes, np.int64)
    validation = keys < np.uint64(validation_keys(validation_fraction))
    counts = [n for split in (stays & ~validation, stays & validation) for n in (split.sum(), sizes[split].sum())]
    before, total = before_and_total(counts, comm)
    return Placement(stays, validation, _by_split(before), _by_split(total))


def _by_split(numbers: Sequence[int]) -> dict[Split, Amount]:
    return {split: Amount(*numbers[2 * i : 2 * i + 2]) for i, split in enumerate(SPLITS)}
