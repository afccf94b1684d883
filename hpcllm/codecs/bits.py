"""Work on single bits, for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpcllm.codecs.kernels import kernel


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
