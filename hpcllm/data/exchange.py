"""Exchanges between ranks whose lists, joined in rank order, are one list.

rank         0        1      2
list      [a b c]    [d]   [e f]
before       0        3      4      before_and_total, total 6
rank 0    [a b c d e f]             gather_array

The first document of each digest is found without any rank seeing all digests (first_occurrences):

    rank 0   a b c a       owner(digest) = digest mod ranks       owner 0 gets  b | b d     keeps the first b, d
    rank 1   b d a    -->  each digest goes to its owner    -->   owner 1 gets  a c a | a   keeps the first a, c
                           (Alltoallv, in order)                  answers go back the same way

An owner receives digests in rank order, and those of a rank in document order: arrival order is global order, so
"first" needs no index on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

Digests = NDArray[np.uint64]  # (documents, 2)
T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)


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
