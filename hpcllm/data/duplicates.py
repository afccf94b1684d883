"""Which documents are the first of their kind, found without any rank seeing all digests.

    rank 0   a b c a       owner(digest) = digest mod ranks       owner 0 gets  b | b d     keeps the first b, d
    rank 1   b d a    -->  each digest goes to its owner    -->   owner 1 gets  a c a | a   keeps the first a, c
                           (Alltoallv, in order)                  answers go back the same way

What an owner receives stands in rank order, and inside a rank in document order: arrival order is global order, so
"first" needs no index on the wire.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Digests = NDArray[np.uint64]  # (documents, 2)


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
    comm.Alltoallv([outgoing, 2 * sent, MPI.UINT64_T], [arrived, 2 * received, MPI.UINT64_T])
    answers = np.empty(len(digests), np.uint8)
    comm.Alltoallv([_is_first(arrived), received, MPI.UINT8_T], [answers, sent, MPI.UINT8_T])
    first = np.empty(len(digests), np.bool_)
    first[by_owner] = answers.astype(np.bool_)
    return first


def _is_first(digests: Digests) -> NDArray[np.uint8]:
    """(n,) 1 where a row has not stood above; a stable sort brings equal rows together, the earliest in front."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    leads = np.ones(len(digests), np.uint8)
    leads[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = np.empty_like(leads)
    first[order] = leads
    return first
