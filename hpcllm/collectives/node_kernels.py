"""What the ranks of a node do with each other's memory, at addresses: counters, copies, sums of rows.

    sources   row 0  [ a0 a1 a2 ... ]   block by block, in first-level cache:  fp32 block = row 0 + row 1 + ...
              row 1  [ b0 b1 b2 ... ]
    targets   row 0, row 1, ...         each = the block, rounded once

Memory is read once and written once whatever the number of rows. Counters are 64-bit atomics, stored with release and
loaded with acquire order, which fence x86, Arm and POWER alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpcllm.codecs.kernels import kernel, narrowed, widened

CACHE_LINE_BYTES = 64
BLOCK = 2048  # fp32 values: 8 KiB, a quarter of a first-level cache
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}  # bytes are moved, not added up
FLOAT32, BFLOAT16 = 0, 1

RANK_BYTES = 128  # of one rank: a cache line of counters, another of what it brought to this call and the last
ENTERED, BETWEEN, LEFT, FILLED, REDUCED, COLLECTED, RELAYED = range(7)  # the counters; they only ever grow


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    return types.voidptr(types.uint64), lambda _context, builder, _signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic  # type: ignore[untyped-decorator]
def _load_acquire(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _store_release(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typing_context: Any, target: Any, source: Any, size_bytes: Any) -> Any:  # noqa: ARG001
    """memcpy: the C library's is the fastest for every length."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(typing_context: Any, target: Any, source: Any) -> Any:  # noqa: ARG001
    """One line of 64 bytes, past the caches."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(32), 16).as_pointer()
        target, source = (builder.inttoptr(address, line) for address in args)
        store = builder.store(builder.load(source, align=1), target, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing_context: Any) -> Any:  # noqa: ARG001
    """A release store does not wait for streamed lines; this does."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


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
    """Whoever sees the counter at `count` sees all that this rank wrote before."""
    _store_release(np.uint64(flags + rank * RANK_BYTES + which * 8), np.uint64(count))


@kernel
def enter(flags: int, rank: int, call: int, task: int, size_bytes: int, window: int, offset: int) -> None:
    """Say what this rank brings to a call. Words of two calls: nobody enters the next but one before all have read."""
    words = carray(_pointer(np.uint64(flags + rank * RANK_BYTES + RANK_BYTES // 2 + call % 2 * 32)), 4, np.int64)
    words[0], words[1], words[2], words[3] = task, size_bytes, window, offset
    post(flags, rank, ENTERED, call)


@kernel
def brought(flags: int, rank: int, call: int, word: int) -> Any:
    """One of the four words that `rank` has brought to a call."""
    words = carray(_pointer(np.uint64(flags + rank * RANK_BYTES + RANK_BYTES // 2 + call % 2 * 32)), 4, np.int64)
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


# ---- sums


@kernel
def sum_rows(kind: int, sources: NDArray[np.uint64], targets: NDArray[np.uint64], offset: int, n: int) -> None:
    """n values at each source address + offset bytes, added in order in fp32 -> every target address + offset."""
    block = np.empty(BLOCK, dtype=np.float32)
    width = 4 if kind == FLOAT32 else 2
    for start in range(0, n, BLOCK):
        count, at = min(BLOCK, n - start), np.uint64(offset + start * width)
        for source in range(sources.size):
            _add(kind, sources[source] + at, block, count, source == 0)
        for target in range(targets.size):
            _store(kind, targets[target] + at, block, count)


@kernel
def _add(kind: int, address: int, block: NDArray[np.float32], count: int, first: bool) -> None:
    if kind == FLOAT32:
        _add_values(carray(_pointer(np.uint64(address)), count, np.float32), block, first)
    elif kind == BFLOAT16:
        _add_values(carray(_pointer(np.uint64(address)), count, np.uint16), block, first)
    else:
        _add_values(carray(_pointer(np.uint64(address)), count, np.int16), block, first)


@kernel
def _add_values(values: NDArray[Any], block: NDArray[np.float32], first: bool) -> None:
    if first:
        for i in range(values.size):
            block[i] = widened(values[i])
    else:
        for i in range(values.size):
            block[i] += widened(values[i])


@kernel
def _store(kind: int, address: int, block: NDArray[np.float32], count: int) -> None:
    if kind == FLOAT32:
        _store_values(block, carray(_pointer(np.uint64(address)), count, np.float32))
    elif kind == BFLOAT16:
        _store_values(block, carray(_pointer(np.uint64(address)), count, np.uint16))
    else:
        _store_values(block, carray(_pointer(np.uint64(address)), count, np.int16))


@kernel
def _store_values(block: NDArray[np.float32], values: NDArray[Any]) -> None:
    for i in range(values.size):
        values[i] = narrowed(block[i], values[i])
