"""Kernel that adds up rows of values at addresses: each is read once and written once, however many rows there are.

    sources   row 0  [ a0 a1 a2 ... ]   fp32: 64 values at a time, in registers:  row 0 + row 1 + ...
              row 1  [ b0 b1 b2 ... ]   else: block by block, widened to fp32, in first-level cache
    targets   row 0, row 1, ...         each = the sum, rounded once

Rows are added in their order, value by value, so that both ways give the same bits. Written as vectors, because a loop
over rows that may be the same memory as the targets stays scalar; and in steps of 64 values, because a core that turns
from row to row only at every block of 8 KiB has its prefetchers begin anew each time: 9 GB/s were read and written
beyond the caches, 70 this way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numpy.typing import NDArray

from hpcllm.codecs.kernels import instruction, kernel, put_floats

BLOCK = 2048  # fp32 values: 8 KiB, a quarter of a first-level cache
STEP = 64  # fp32 values in registers: 4 of the longest kind, 16 of the shortest
FLOAT32, BFLOAT16 = 0, 1
WORD, VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), 16)


@instruction(types.voidptr, types.uint64)
def pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, cgutils.voidptr_t)


@instruction(types.void, types.voidptr, types.uint64, types.voidptr, types.uint64, types.uint64)
def _add_step(builder: Any, sources: Any, source_count: Any, targets: Any, target_count: Any, at: Any) -> None:
    """STEP fp32 values, `at` bytes behind each of the sources' addresses, added up -> behind each of the targets'."""
    totals = [cgutils.alloca_once(builder, VECTOR) for _ in range(STEP // VECTOR.count)]

    def vectors(addresses: Any, row: Any) -> list[Any]:
        word = builder.gep(builder.bitcast(addresses, WORD.as_pointer()), [row])
        first = builder.inttoptr(builder.add(builder.load(word), at), VECTOR.as_pointer())
        return [builder.gep(first, [ir.Constant(WORD, place)]) for place in range(len(totals))]

    for total, vector in zip(totals, vectors(sources, ir.Constant(WORD, 0)), strict=True):
        builder.store(builder.load(vector, align=4), total)
    with cgutils.for_range(builder, source_count, start=ir.Constant(WORD, 1)) as loop:
        for total, vector in zip(totals, vectors(sources, loop.index), strict=True):
            builder.store(builder.fadd(builder.load(total), builder.load(vector, align=4)), total)
    with cgutils.for_range(builder, target_count) as loop:
        for total, vector in zip(totals, vectors(targets, loop.index), strict=True):
            builder.store(builder.load(total), vector, align=4)


@kernel
def sum_rows(kind: int, sources: NDArray[np.uint64], targets: NDArray[np.uint64], offset: int, n: int) -> None:
    """n values at each source address + offset bytes, added in order in fp32 -> every target address + offset.

    kind: of node_kernels.KINDS. A target may be a source, but not overlap one.
    """
    if kind == FLOAT32:
        done = n // STEP * STEP
        for start in range(0, done, STEP):
            at = np.uint64(offset + start * 4)
            _add_step(sources.ctypes, np.uint64(sources.size), targets.ctypes, np.uint64(targets.size), at)
        _sum_blocks(np.float32, 4, sources, targets, offset + done * 4, n - done)
    elif kind == BFLOAT16:
        _sum_blocks(np.uint16, 2, sources, targets, offset, n)
    else:
        _sum_blocks(np.int16, 2, sources, targets, offset, n)


@kernel
def _sum_blocks(
    dtype: Any, width: int, sources: NDArray[np.uint64], targets: NDArray[np.uint64], offset: int, n: int
) -> None:
    block = np.empty(BLOCK, dtype=np.float32)
    for start in range(0, n, BLOCK):
        count, at = min(BLOCK, n - start), np.uint64(offset + start * width)
        for source in range(sources.size):
            put_floats(carray(pointer(sources[source] + at), count, dtype), source > 0, block[:count])
        for target in range(targets.size):
            put_floats(block, False, carray(pointer(targets[target] + at), count, dtype))
