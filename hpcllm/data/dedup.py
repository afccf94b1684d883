"""Pass 1: every document is read once; its digest, key and size remain. Duplicates are found from the digests.

documents --> digest        key                 bytes         DocumentIndex: 32 bytes a document, in order
                |            |                    |
            first with    which split?         how much      Assignment: which documents stay, in which split, and
            its text?     in the tokenizer's   (exscan)      how much of each split is on earlier ranks and on all
            (all ranks)   sample?

The key is a keyed blake2b-64 of the digest (blake2b-128 of the text), so it depends on the seed and the text alone:
adding, removing or reordering documents moves no other document from one split to the other, and equal texts are always
in the same split.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.documents import Document, Problem
from hpcllm.data.exchange import Digests, before_and_total, first_occurrences
from hpcllm.data.prepare_report import Problems
from hpcllm.data.store import SPLITS, Split
from hpcllm.data.tokenizer import TokenizerSample

if TYPE_CHECKING:
    from mpi4py import MPI

DIGEST_BYTES = 16


@dataclass
class DocumentIndex:
    """Digest, key and size of this rank's documents in order, and the problems met on the way."""

    digests: bytearray = field(default_factory=bytearray)
    keys: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    problems: Problems = field(default_factory=Problems)
    sample: TokenizerSample = field(default_factory=TokenizerSample)

    def digest_array(self) -> Digests:
        """(documents, 2) uint64."""
        return np.frombuffer(bytes(self.digests), np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class Amount:
    documents: int
    bytes: int


@dataclass(frozen=True)
class Assignment:
    """Split of each of this rank's documents that stay, and the amount of each split on earlier ranks and on all."""

    stays: NDArray[np.bool_]  # (documents,)
    validation: NDArray[np.bool_]  # (documents,)
    before: dict[Split, Amount]
    total: dict[Split, Amount]

    def split_of(self, index: int) -> Split:
        return "validation" if self.validation[index] else "train"


def digest(text: str) -> bytes:
    """16 bytes by which equal documents are found; by chance alone 2^64 documents would be needed for a clash."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=DIGEST_BYTES).digest()


def split_key(document_digest: bytes, seed: int) -> int:
    """A number below 2^64, uniform over documents, another one for each seed (0 <= seed < 2^63)."""
    keyed = hashlib.blake2b(document_digest, digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(keyed.digest(), "little")


def validation_keys(validation_fraction: float) -> int:
    """Number below which the keys of validation documents are; 0 <= validation_fraction < 1."""
    return int(validation_fraction * 2.0**64)


def index_documents(items: Iterator[Document | Problem], seed: int, validation_fraction: float) -> DocumentIndex:
    """Read everything once. Not collective."""
    index = DocumentIndex()
    limit = validation_keys(validation_fraction)
    for item in items:
        if isinstance(item, Problem):
            index.problems.add(item.reason, item.origin)
            continue
        name = digest(item.text)
        key = split_key(name, seed)
        if key >= limit:
            index.sample.offer(key, len(index.keys), item.text)
        index.digests += name
        index.keys.append(key)
        index.sizes.append(item.size_bytes)
    return index


def assign_splits(index: DocumentIndex, validation_fraction: float, comm: MPI.Intracomm) -> Assignment:
    """Drop duplicates and count what earlier ranks have. Collective over comm."""
    stays = first_occurrences(index.digest_array(), comm)
    keys, sizes = np.array(index.keys, np.uint64), np.array(index.sizes, np.int64)
    validation = keys < np.uint64(validation_keys(validation_fraction))
    counts = [n for split in (stays & ~validation, stays & validation) for n in (split.sum(), sizes[split].sum())]
    before, total = before_and_total(counts, comm)
    return Assignment(stays, validation, _by_split(before), _by_split(total))


def _by_split(numbers: Sequence[int]) -> dict[Split, Amount]:
    return {split: Amount(*numbers[2 * i : 2 * i + 2]) for i, split in enumerate(SPLITS)}
