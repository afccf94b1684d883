"""What ranks tell each other about lists that, joined in rank order, are one list.

rank         0        1      2
list      [a b c]    [d]   [e f]
before       0        3      4      before_and_total, total 6
rank 0    [a b c d e f]             gather_array
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.together import raise_together

T = TypeVar("T")
Number = TypeVar("Number", bound=np.generic)


def on_all(comm: MPI.Intracomm, function: Callable[[], T]) -> T:
    """Run `function`, which must not communicate, on every rank; if it fails on any, raise on all. Collective."""
    result, failure = None, None
    try:
        result = function()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
    raise_together(comm, failure)
    return cast(T, result)


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
