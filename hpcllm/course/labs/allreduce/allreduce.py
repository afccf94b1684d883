"""Lab 2: the sum over all ranks. Fill in this file, then run `hpcllm course check`.

The functions below are right, but too slow: rank 0 does all the work. The sheet says what to do.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Values = NDArray[np.float32]


def allreduce(x: Values, comm: MPI.Intracomm) -> None:
    """Sum x (n,) over all ranks of comm, in place. Collective over comm.

    Any n, also 0 and fewer values than ranks; any number of ranks, also 1. Afterwards x has the same bits on all ranks.
    Each rank sends at most 2 (p - 1) / p of x, and a value a message more, where p is the number of ranks: a ring.
    """
    if comm.rank:
        comm.Send(x, dest=0)
        comm.Recv(x, source=0)
        return
    theirs = np.empty_like(x)
    for rank in range(1, comm.size):
        comm.Recv(theirs, source=rank)
        x += theirs
    for rank in range(1, comm.size):
        comm.Send(x, dest=rank)


def allreduce_small(x: Values, comm: MPI.Intracomm) -> None:
    """Sum x (n,) as above, in few messages: each rank sends at most 2 log2(p) of them, rounded up, of any length."""
    allreduce(x, comm)


PREDICTIONS: dict[str, float | None] = {
    "messages": None,  # that one rank of 4 sends in allreduce, for long x
    "bytes": None,  # that one rank of 4 sends in allreduce, for a million values
    "rounds": None,  # messages that rank 0 of 4 sends in allreduce_small
}
