"""Arrays of ordinary memory through a window of bounded size: reduce-scatter, all-gather or both inside a node.

    chunks of x, one an owner      pieces: segment 0 | segment 1 | ...          each segment passes SLOTS slots in turn

    1 fill     every rank copies its pieces of the others' chunks into its own slot
    2 reduce   owner: own piece (where it is) + the others' slots, in rank order  ->  own piece, and own slot
    3 collect  every rank copies the reduced pieces out of the others' slots

Each rank does whichever step is ready next, so that a late rank holds up its own pieces only; a slot is filled again
when all have collected from it. Slots are small enough to stay in cache: main memory sees x read once and written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import kernel
from hpcllm.collectives.node_kernels import COLLECTED, FILLED, REDUCED, awaited, copy, hand, post, sum_rows

SLOTS = 3  # a rank may be one segment ahead and another one behind without waiting

EXCHANGE = np.dtype(
    [
        *((name, np.int64) for name in ("flags", "rank", "ranks", "kind", "width")),
        *((name, np.int64) for name in ("x", "own", "result")),  # addresses: whole array, own chunk's input and output
        *((name, np.int64) for name in ("piece", "slot_bytes", "first", "segments")),  # values, bytes, number, count
        *((name, np.int64) for name in ("reduces", "gathers", "far")),
        *((name, np.int64) for name in ("filled", "reduced", "collected")),  # segments done so far
    ]
)


@kernel
def advance(job: NDArray[np.void], rows: NDArray[np.uint64], cuts: NDArray[np.int64], spins: int) -> bool:
    """Do what can be done, give up after that many fruitless looks. True if all is done. job: (1,) EXCHANGE, updated.

    rows: (ranks,) address of each rank's first slot. cuts: (ranks + 1,) where in x the ranks' chunks begin.
    """
    e = job[0]
    while e.collected < e.segments:
        if not (_collect(e, rows, cuts) or _reduce(e, rows, cuts) or _fill(e, rows, cuts)):
            if spins <= 0:
                return False
            spins -= 1
    return True


@kernel
def _fill(e: Any, rows: NDArray[np.uint64], cuts: NDArray[np.int64]) -> bool:
    s = e.filled
    if s == e.segments or awaited(e.flags, e.ranks, COLLECTED, max(e.first + s + 1 - SLOTS, 0), 0) >= 0:
        return False
    if e.reduces:
        slot = _slot(e, rows, e.rank, s)
        for owner in range(e.ranks):
            if owner != e.rank:
                start, n = _piece(e, cuts, owner, s)
                hand(slot + owner * e.piece * e.width, e.x + start * e.width, n * e.width, e.far)
    e.filled += 1
    post(e.flags, e.rank, FILLED, e.first + e.filled)
    return True


@kernel
def _reduce(e: Any, rows: NDArray[np.uint64], cuts: NDArray[np.int64]) -> bool:
    s = e.reduced
    if s == e.filled or (e.reduces and awaited(e.flags, e.ranks, FILLED, e.first + s + 1, 0) >= 0):
        return False
    start, n = _piece(e, cuts, e.rank, s)
    within, place = (start - cuts[e.rank]) * e.width, e.rank * e.piece * e.width
    if e.reduces:
        sources, targets = np.empty(e.ranks, dtype=np.uint64), np.full(1, e.result + within, dtype=np.uint64)
        for rank in range(e.ranks):
            sources[rank] = e.own + within if rank == e.rank else _slot(e, rows, rank, s) + place
        sum_rows(e.kind, sources, targets, 0, n)
    elif e.own != e.result:
        copy(e.result + within, e.own + within, n * e.width)
    if e.gathers:
        hand(_slot(e, rows, e.rank, s) + place, e.result + within, n * e.width, e.far)
    e.reduced += 1
    post(e.flags, e.rank, REDUCED, e.first + e.reduced)
    return True


@kernel
def _collect(e: Any, rows: NDArray[np.uint64], cuts: NDArray[np.int64]) -> bool:
    s = e.collected
    if s == e.reduced or (e.gathers and awaited(e.flags, e.ranks, REDUCED, e.first + s + 1, 0) >= 0):
        return False
    if e.gathers:
        for owner in range(e.ranks):
            if owner != e.rank:
                start, n = _piece(e, cuts, owner, s)
                place = owner * e.piece * e.width
                copy(e.x + start * e.width, _slot(e, rows, owner, s) + place, n * e.width)
    e.collected += 1
    post(e.flags, e.rank, COLLECTED, e.first + e.collected)
    return True


@kernel
def _slot(e: Any, rows: NDArray[np.uint64], rank: int, segment: int) -> Any:
    return np.int64(rows[rank]) + (e.first + segment) % SLOTS * e.slot_bytes


@kernel
def _piece(e: Any, cuts: NDArray[np.int64], owner: int, segment: int) -> tuple[int, int]:
    """Where in x the owner's piece of a segment begins, and its values."""
    start = min(cuts[owner] + segment * e.piece, cuts[owner + 1])
    return start, min(e.piece, cuts[owner + 1] - start)
