"""Tokens of a task, made by rank 0 from files that it alone reads, for all ranks.

rank 0   rows of ints [[5, 2, 7], [], [1]] --> lengths 3 0 1, ints 5 2 7 1 --broadcast--> the same rows on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Request, Tokens
from hpcllm.mpi.collective_errors import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_TOKENS = 1 << 28  # of all rows of a task


def share_requests(make: Callable[[], list[Request]], comm: MPI.Intracomm | None) -> list[Request]:
    """Make requests on rank 0, for all ranks. Collective over comm. Raises what `make` raises, and DataError."""
    rows = share_rows(lambda: [part for request in make() for part in request], comm)
    return [Request(*pair) for pair in zip(rows[::2], rows[1::2], strict=True)]


def share_rows(make: Callable[[], Sequence[Tokens]], comm: MPI.Intracomm | None) -> list[Tokens]:
    """Make rows of ints below 2^31 on rank 0, for all ranks. Collective. Raises what `make` raises, and DataError."""
    found: list[Tokens] = []

    def count() -> tuple[int, int]:
        found[:] = make()
        tokens = sum(map(len, found))
        if tokens > MOST_TOKENS:
            raise DataError(f"a task has {tokens:,} tokens; valid: up to {MOST_TOKENS:,}, split it")
        return len(found), tokens

    rows, tokens = on_root(comm, count)
    if comm is None:
        return found
    from hpcllm.mpi.wait import together  # starts MPI

    lengths = np.array([len(row) for row in found] or [0] * rows, np.int64)
    ids = np.array([token for row in found for token in row] or [0] * tokens, np.int32)
    for array in (lengths, ids):
        together(comm, "to get the tokens of a task", partial(comm.Bcast, array))
    return [tuple(row.tolist()) for row in np.split(ids, np.cumsum(lengths)[:-1])] if rows else []
