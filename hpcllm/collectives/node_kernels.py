"""Kernels of the ranks of a node on each other's memory, at addresses: counters, copies, exchanges. Sums: row_sums.py.

    rank 0   post(ENTERED, 7)                            awaited(..., ENTERED, 7): all are at call 7, or who is not
    rank 1        post(ENTERED, 7)                       compare: do all say the same of it?
    rank 2                    post(ENTERED, 7)

Counters are 64-bit atomics, stored with release and loaded with acquire order, which fence x86, Arm and POWER alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numpy.typing import NDArray

from hpcllm.codecs.kernels import instruction, kernel
from hpcllm.collectives.row_sums import pointer, sum_rows

CACHE_LINE_BYTES = 64
LINE = ir.VectorType(ir.IntType(32), 16)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}  # bytes are moved, not added up

RANK_BYTES = 128  # for each rank: a cache line of counters, another of what it brought to this call and the last
ENTERED, BETWEEN, LEFT, FILLED, REDUCED, COLLECTED, RELAYED = range(7)  # the counters; they only ever grow


@instruction(types.uint64, types.uint64)
def _load_acquire(builder: Any, address: Any) -> Any:
    return builder.load_atomic(builder.inttoptr(address, ir.IntType(64).as_pointer()), "acquire", 8)


@instruction(types.void, types.uint64, types.uint64)
def _store_release(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, builder.inttoptr(address, ir.IntType(64).as_pointer()), "release", 8)


@instruction(types.void, types.uint64, types.uint64, types.uint64)
def _copy(builder: Any, target: Any, source: Any, size_bytes: Any) -> None:
    """memcpy: the C library's is the fastest for every length."""
    target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
    cgutils.raw_memcpy(builder, target, source, size_bytes, 1)


@instruction(types.void, types.uint64, types.uint64)
def _stream_line(builder: Any, target: Any, source: Any) -> None:
    """One line of 64 bytes, past the caches."""
    target, source = (builder.inttoptr(address, LINE.as_pointer()) for address in (target, source))
    store = builder.store(builder.load(source, align=1), target, align=64)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


@instruction(types.void)
def _fence(builder: Any) -> None:
    """A release store does not wait for streamed lines; this does."""
    builder.fence("seq_cst")


@kernel
def awaited(flags: int, ranks: int, which: int, count: int, spins: int) -> int:
    """The first rank whose counter is still below `count` after that many more looks, or -1."""
    for rank in range(ranks):
        address = np.uint64(flags + rank * RANK_BYTES + which * 8)
        while _load_acquire(address) < np.uint64(count):
            if spins <= 0:
                return rank
            spins -= 1
    return -1


@kernel
def post(flags: int, rank: int, which: int, count: int) -> None:
    """Set a counter: whoever sees it at `count` sees all that this rank wrote before."""
    _store_release(np.uint64(flags + rank * RANK_BYTES + which * 8), np.uint64(count))


@kernel
def enter(flags: int, rank: int, call: int, task: int, size_bytes: int, window: int, offset: int) -> None:
    """Say what this rank brings to a call. Words of two calls: nobody enters the next but one before all have read."""
    words = carray(pointer(np.uint64(flags + rank * RANK_BYTES + RANK_BYTES // 2 + call % 2 * 32)), 4, np.int64)
    words[0], words[1], words[2], words[3] = task, size_bytes, window, offset
    post(flags, rank, ENTERED, call)


@kernel
def brought(flags: int, rank: int, call: int, word: int) -> Any:
    """One of the four words that `rank` has brought to a call."""
    words = carray(pointer(np.uint64(flags + rank * RANK_BYTES + RANK_BYTES // 2 + call % 2 * 32)), 4, np.int64)
    return words[word]


@kernel
def compare(flags: int, ranks: int, call: int) -> int:
    """-1: all brought the same; -2: only the places of their arrays differ; else a rank whose task is not rank 0's."""
    verdict = -1
    for rank in range(1, ranks):
        for word in range(4):
            if brought(flags, rank, call, word) != brought(flags, 0, call, word):
                if word < 2:
                    return rank
                verdict = -2
    return verdict


@kernel
def relay(flags: int, rank: int, ranks: int, first: int, end: int, looks: int) -> bool:
    """Pass a token round: rank h % ranks makes hop h, after hop h - 1. Give up after that many looks, letting all pass.

    first, end: hops, multiples of ranks; `first` is where the last round ended. True if this rank did not give up.
    """
    for hop in range(first + rank, end, ranks):
        before = np.uint64(flags + (hop - 1) % ranks * RANK_BYTES + RELAYED * 8)
        while _load_acquire(before) < np.uint64(hop):
            looks -= 1
            if looks <= 0:
                post(flags, rank, RELAYED, end)
                return False
        post(flags, rank, RELAYED, hop + 1)
    post(flags, rank, RELAYED, end)
    return True


@kernel
def copy(target: int, source: int, size_bytes: int) -> None:
    _copy(np.uint64(target), np.uint64(source), np.uint64(size_bytes))


@kernel
def hand(target: int, source: int, size_bytes: int, far: bool) -> None:
    """copy, for memory that another core reads next. far: that core shares no cache with this one."""
    if not far:
        copy(target, source, size_bytes)
        return
    head = min(-target % CACHE_LINE_BYTES, size_bytes)
    copy(target, source, head)
    end = head + (size_bytes - head) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    for done in range(head, end, CACHE_LINE_BYTES):
        _stream_line(np.uint64(target + done), np.uint64(source + done))
    copy(target + end, source + end, size_bytes - end)
    _fence()


# ---- arrays of ordinary memory through a window of bounded size: reduce-scatter, all-gather or both
#
#    chunks of x, one an owner      pieces: segment 0 | segment 1 | ...          each segment passes SLOTS slots in turn
#
#    1 fill     every rank copies its pieces of the others' chunks into its own slot
#    2 reduce   owner: own piece (where it is) + the others' slots, in rank order  ->  own piece, and own slot
#    3 collect  every rank copies the reduced pieces out of the others' slots
#
# Each rank does whichever step is ready next, so that a late rank holds up its own pieces only; a slot is filled again
# when all have collected from it. Slots are small enough to stay in cache: main memory sees x read once and written
# once.

SLOTS = 3  # a rank may be one segment ahead and another one behind without waiting

EXCHANGE = np.dtype(
    [
        *((name, np.int64) for name in ("flags", "rank", "ranks", "kind", "width")),
        *((name, np.int64) for name in ("x", "own", "result")),  # addresses: whole array, own chunk's input and output
        *((name, np.int64) for name in ("piece", "begin")),  # values in one, number of the first
        *((name, np.int64) for name in ("slot_bytes", "first", "segments")),  # bytes, number, count
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
    """First value in x of the owner's piece of a segment, and its length."""
    start = min(cuts[owner] + (e.begin + segment) * e.piece, cuts[owner + 1])
    return start, min(e.piece, cuts[owner + 1] - start)
