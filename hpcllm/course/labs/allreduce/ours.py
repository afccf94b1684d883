"""A ring and a recursive doubling in the plainest MPI: what a student's functions race against.

The trainer's own sums (hpcllm/collectives) poll, so that a thread beside them can compute; with more ranks than cores a
blocking receive is several times as fast for short arrays, and by how much depends on the load. These two wait as a
student's functions do, so the ratio of both says how the functions differ, not how the machine feels.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.mpi.partition import chunk_range

Values = NDArray[np.float32]


def ring(x: Values, comm: MPI.Intracomm) -> None:
    """Sum x (n,) over comm in place: rank r ends the first half with the sum of chunk r. Collective over comm."""
    ranks, rank = comm.size, comm.rank
    chunks = [x[slice(*chunk_range(x.size, ranks, place))] for place in range(ranks)]
    landing = np.empty(-(-x.size // ranks), x.dtype)
    for hop in range(ranks - 1):
        theirs = chunks[(rank - hop - 2) % ranks]
        _shift(chunks[(rank - hop - 1) % ranks], landing[: theirs.size], comm)
        theirs += landing[: theirs.size]
    for hop in range(ranks - 1):
        _shift(chunks[(rank - hop) % ranks], chunks[(rank - hop - 1) % ranks], comm)


def _shift(mine: Values, theirs: Values, comm: MPI.Intracomm) -> None:
    """Send to the right neighbour, receive from the left one."""
    request = comm.Isend(mine, dest=(comm.rank + 1) % comm.size)
    comm.Recv(theirs, source=(comm.rank - 1) % comm.size)
    request.Wait()


def doubling(x: Values, comm: MPI.Intracomm) -> None:
    """Sum x (n,) over comm in place in log2(p) exchanges; ranks beyond the largest 2^k hand theirs in first."""
    places = 1 << (comm.size.bit_length() - 1)
    landing = np.empty_like(x)
    if comm.rank >= places:
        comm.Send(x, dest=comm.rank - places)
        comm.Recv(x, source=comm.rank - places)
        return
    extra = comm.rank + places
    if extra < comm.size:
        comm.Recv(landing, source=extra)
        x += landing
    distance = 1
    while distance < places:
        comm.Sendrecv(x, dest=comm.rank ^ distance, recvbuf=landing, source=comm.rank ^ distance)
        x += landing
        distance *= 2
    if extra < comm.size:
        comm.Send(x, dest=extra)


REFERENCE = SimpleNamespace(allreduce=ring, allreduce_small=doubling)
