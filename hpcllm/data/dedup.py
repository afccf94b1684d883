"""Pass 1: every document is read once; its digest, key and size remain. Duplicates are found from the digests.

documents --> digest        key                 bytes         DocumentIndex: 32 bytes a document, in order
                |            |                    |
            first with    which split?         how much      Assignment: which documents stay, in which split, and
            its text?     in the tokenizer's   (exscan)      how much of each split is on earlier ranks and on all
            (all ranks)   sample?

The key is a keyed blake2b-64 of the digest (blake2b-128 of the text), so it depends on the seed and the text alone:
adding, removing or reordering documents moves no other document from one split to the other, and equal texts are always
in the same split.

The first document of each digest is found without any rank seeing all digests (first_occurrences):

    rank 0   a b c a       owner(digest) = digest mod ranks       owner 0 gets  b | b d     keeps the first b, d
    rank 1   b d a    -->  each digest goes to its owner    -->   owner 1 gets  a c a | a   keeps the first a, c
                           (Alltoallv, in order)                  answers go back the same way

An owner receives digests in rank order, and those of a rank in document order: arrival order is global order, so
"first" needs no index on the wire.

A tokenizer is trained on a sample that is the same for any number of ranks: the training documents of the smallest
split keys, which is fair, since keys are uniform over documents (TokenizerSample).

    each rank, while it reads      the texts of its smallest keys, SAMPLE_BYTES of them at most   (a heap)
    all ranks                      bisect for the key up to which all texts together hold SAMPLE_BYTES
    rank 0                         receives those texts in document order

A document's place in it depends on its key and on the bytes of smaller keys, never on who read it. No rank holds more
than SAMPLE_BYTES and one text.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.documents import Document, Problem
from hpcllm.data.prepare_report import Problems
from hpcllm.data.store import SPLITS, Split

if TYPE_CHECKING:
    from mpi4py import MPI

Digests = NDArray[np.uint64]  # (documents, 2)
Number = TypeVar("Number", bound=np.generic)
DIGEST_BYTES = 16
SAMPLE_BYTES = 32 * 2**20
SAMPLE_CHARACTERS = 2**20  # of each document: its beginning


class TokenizerSample:
    """Candidates of one rank: (key, document index, text), the largest keys dropped once the rest suffices."""

    def __init__(self, enough_bytes: int = SAMPLE_BYTES) -> None:
        self._enough_bytes = enough_bytes
        self._bytes = 0
        self._heap: list[tuple[int, int, bytes]] = []  # keys negated: the largest on top
        self._seen: set[int] = set()

    def offer(self, key: int, index: int, text: str) -> None:
        """Add a document as a candidate. Equal documents have equal keys, and only the first of them counts."""
        full = self._bytes >= self._enough_bytes
        if key in self._seen or (full and key > -self._heap[0][0]):
            return
        data = text[:SAMPLE_CHARACTERS].encode("utf-8")
        heapq.heappush(self._heap, (-key, index, data))
        self._seen.add(key)
        self._bytes += len(data)
        while self._bytes - len(self._heap[0][2]) >= self._enough_bytes:
            key_out, _, data_out = heapq.heappop(self._heap)
            self._seen.remove(-key_out)
            self._bytes -= len(data_out)

    def gather(self, stays: NDArray[np.bool_], comm: MPI.Intracomm) -> list[str]:
        """Return the sample on rank 0 in document order, an empty list elsewhere. Collective over comm.

        stays: (documents,) bool, true where no earlier document of any rank has the same text.
        """
        mine = sorted((index, -key, data) for key, index, data in self._heap if stays[index])
        limit = _enough_key([(key, len(data)) for _, key, data in mine], self._enough_bytes, comm)
        chosen = [data for _, key, data in mine if key <= limit]
        lengths = gather_array(np.array([len(data) for data in chosen], np.int64), comm)
        joined = gather_array(np.frombuffer(b"".join(chosen), np.uint8), comm)
        ends = np.cumsum(lengths)
        return [joined[end - size : end].tobytes().decode("utf-8") for end, size in zip(ends, lengths, strict=True)]


def _enough_key(keys_and_bytes: list[tuple[int, int]], enough_bytes: int, comm: MPI.Intracomm) -> int:
    """Find the smallest key up to which all ranks together hold `enough_bytes`; 2^64 - 1 if they never do."""
    ordered = np.array([key for key, _ in sorted(keys_and_bytes)], np.uint64)
    held = np.cumsum([0, *(size for _, size in sorted(keys_and_bytes))])
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        mine = int(held[np.searchsorted(ordered, np.uint64(middle), side="right")])
        low, high = (low, middle) if comm.allreduce(mine) >= enough_bytes else (middle + 1, high)
    return low


@dataclass
class DocumentIndex:
    """Digest, key and size of this rank's documents in order, and the problems met on the way."""

    digests: bytearray = field(default_factory=bytearray)
    keys: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    problems: Problems = field(default_factory=Problems)
    kinds: Counter[str] = field(default_factory=Counter)  # kind of a document -> how many
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


def before_and_total(mine: Sequence[int], comm: MPI.Intracomm) -> tuple[list[int], list[int]]:
    """Sums, number by number, over the ranks before this one, and over all ranks. Collective over comm."""
    counts = np.array(mine, np.int64)
    before, total = np.zeros_like(counts), np.empty_like(counts)
    comm.Exscan(counts, before)
    comm.Allreduce(counts, total)
    return ([0] * len(counts) if comm.rank == 0 else before.tolist()), total.tolist()


def gather_array(mine: NDArray[Number], comm: MPI.Intracomm) -> NDArray[Number]:
    """One-dimensional arrays joined in rank order on rank 0, an empty one elsewhere. Collective over comm."""
    counts = comm.gather(len(mine))
    whole = np.empty(sum(counts or ()), mine.dtype)
    comm.Gatherv(mine, [whole, counts] if comm.rank == 0 else None)
    return whole


def first_occurrences(digests: Digests, comm: MPI.Intracomm) -> NDArray[np.bool_]:
    """True for each document that no earlier one equals, in global (rank, index) order. Collective over comm.

    digests: (n, 2) uint64, n may differ by rank and be 0. Returns (n,) bool.
    """
    owner = (digests[:, 0] % np.uint64(comm.size)).astype(np.intp)
    by_owner = np.argsort(owner, kind="stable")
    sent = np.bincount(owner, minlength=comm.size).astype(np.int64)
    received = np.empty_like(sent)
    comm.Alltoall(sent, received)
    arrived = np.empty((int(received.sum()), 2), np.uint64)
    outgoing = np.ascontiguousarray(digests[by_owner])
    comm.Alltoallv([outgoing, 2 * sent], [arrived, 2 * received])
    answers = np.empty(len(digests), np.uint8)
    comm.Alltoallv([_is_first(arrived), received], [answers, sent])
    first = np.empty(len(digests), np.bool_)
    first[by_owner] = answers.astype(np.bool_)
    return first


def _is_first(digests: Digests) -> NDArray[np.uint8]:
    """(n,) 1 where no earlier row is equal; a stable sort brings equal rows together, the earliest in front."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    leads = np.ones(len(digests), np.uint8)
    leads[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = np.empty_like(leads)
    first[order] = leads
    return first


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
        name = digest(item.identity)
        key = split_key(name, seed)
        if key >= limit:
            index.sample.offer(key, len(index.keys), item.text)
        index.digests += name
        index.keys.append(key)
        index.sizes.append(item.size_bytes)
        index.kinds[item.kind] += 1
    return index


def assign_splits(
    index: DocumentIndex, validation_fraction: float, comm: MPI.Intracomm, documents_each: int = 1
) -> Assignment:
    """Drop duplicates and count what earlier ranks have. Collective over comm.

    documents_each: 2 where what was read as one, a pair of preferences, is stored as two documents.
    """
    stays = first_occurrences(index.digest_array(), comm)
    keys, sizes = np.array(index.keys, np.uint64), np.array(index.sizes, np.int64)
    validation = keys < np.uint64(validation_keys(validation_fraction))
    staying = (stays & ~validation, stays & validation)
    counts = [n for split in staying for n in (documents_each * split.sum(), sizes[split].sum())]
    before, total = before_and_total(counts, comm)
    by_split = ({split: Amount(*n[2 * i : 2 * i + 2]) for i, split in enumerate(SPLITS)} for n in (before, total))
    return Assignment(stays, validation, *by_split)
