"""Work on bits, for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpcllm.codecs.kernels import kernel, widened


@intrinsic  # type: ignore[untyped-decorator]
def first_one(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """Place of the lowest 1 in 64 bits; 64 if there is none."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.cttz(
        args[0], ir.Constant(ir.IntType(1), 0)
    )


@intrinsic  # type: ignore[untyped-decorator]
def count_ones(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """How many of 64 bits are 1."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic  # type: ignore[untyped-decorator]
def leading_zeros(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """Zeros above the highest 1 in 64 bits; 64 if there is none."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.ctlz(
        args[0], ir.Constant(ir.IntType(1), 0)
    )


@intrinsic  # type: ignore[untyped-decorator]
def reverse_bytes(typing_context: Any, bits: Any) -> Any:  # noqa: ARG001
    """The eight bytes of 64 bits the other way round."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.bswap(args[0])


@kernel
def transpose_bits(bytes8: NDArray[np.uint64]) -> None:
    """Bit j of byte i <-> bit i of byte j, in each word of eight bytes."""
    for w in range(len(bytes8)):
        x = bytes8[w]
        t = (x ^ (x >> np.uint64(7))) & np.uint64(0x00AA00AA00AA00AA)
        x ^= t ^ (t << np.uint64(7))
        t = (x ^ (x >> np.uint64(14))) & np.uint64(0x0000CCCC0000CCCC)
        x ^= t ^ (t << np.uint64(14))
        t = (x ^ (x >> np.uint64(28))) & np.uint64(0x00000000F0F0F0F0)
        bytes8[w] = x ^ t ^ (t << np.uint64(28))


@kernel
def copy_bytes(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """To the front of `out`. A loop, which is many times as fast as numba's assignment of slices."""
    for i in range(len(data)):
        out[i] = data[i]
    return len(data)


@kernel
def put_floats(values: NDArray[Any], add: bool, out: NDArray[np.float32]) -> None:
    """The first values, as float32, to `out`, or added to it."""
    if add:
        for i in range(len(out)):
            out[i] += widened(values[i])
    else:
        for i in range(len(out)):
            out[i] = widened(values[i])
