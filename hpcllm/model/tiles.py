"""Products of a few rows with four rows, in vector registers: what few_rows.py is made of.

    w0 [ 16 numbers ]  w1 [ .. ]  w2 [ .. ]  w3 [ .. ]      16 of each row at a time, and of x the same
    x0 [ 16 numbers ]     +           +          +    \\
    x1       ..           +           +          +     a register for each pair of rows, with 16 sums of its own
    x2                    +           +          +    /
    x3                    +           +          +
                                            at the end the sums of each register are added, neighbours first

Numba leaves vector registers to the compiler, which finds half of this speed or less; so this loop is written in the
compiler's own language. Registers are as wide as the machine's. Where it multiplies pairs of bf16 by itself, x has to
be bf16 too; elsewhere numbers are widened to float32 as they are loaded. A product is added up in the same order
whatever rows stand beside it: what a text gets depends on no other text, in no bit.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hpcllm.codecs.kernels import FLOAT, INT32

TILE = 4  # rows of w, and of x where there are as many
FEATURES = dict(binding.get_host_cpu_features())
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
# a numba that compiles for another processor than this one must not get this one's instructions
HAS_BF16 = bool(FEATURES.get("avx512bf16")) and not (numba.config.CPU_NAME or numba.config.CPU_FEATURES)
SUMS = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(INT32, LANES)
STEP = 2 * LANES  # rows are read in multiples of it
AHEAD = 2 * TILE  # rows
DOT_BF16 = "llvm.x86.avx512bf16.dpbf16ps.512"  # each of 16 sums gets two products


def _products_of(rows: int, columns: int) -> Any:
    """Make the instruction that multiplies so many rows of x with so many of w."""

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(typing_context: Any, x: Any, w: Any, sums: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x_rows = _rows(context, builder, x, args[0], rows)
            w_rows = _rows(context, builder, w, args[1], columns)
            inputs = cgutils.unpack_tuple(builder, context.make_array(w)(context, builder, args[1]).shape)[1]
            word = inputs.type
            load, count = (_load_pairs, STEP) if x.dtype == types.uint16 else (_load, LANES)
            totals = [cgutils.alloca_once_value(builder, ir.Constant(SUMS, None)) for _ in range(rows * columns)]
            with cgutils.for_range_slice(builder, word(0), inputs, word(count), word) as (i, _):
                own = [load(builder, row, i, x.dtype) for row in x_rows]
                for j, row in enumerate(w_rows):
                    if rows == TILE:  # ahead in memory, not in these rows: four streams would be too many to foresee
                        ahead = builder.add(builder.mul(inputs, word(AHEAD)), builder.mul(i, word(TILE)))
                        _ask_for(builder, builder.gep(w_rows[0], [builder.add(ahead, word(j * count))]))
                    other = load(builder, row, i, w.dtype)
                    for total, value in zip(totals[j::columns], own, strict=True):
                        builder.store(_add(builder, builder.load(total), value, other), total)
            out = context.make_array(sums)(context, builder, args[2]).data
            for k, vector in enumerate(_across(builder, [builder.load(total) for total in totals])):
                address = builder.gep(out, [INT32(k * vector.type.count)])
                builder.store(vector, builder.bitcast(address, vector.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(x, w, sums), generate

    return multiply


# Write sums of products of x (rows, I) and w (columns, I) to sums (rows, columns) float32, contiguous. I: a multiple of
# STEP. x: float32, or bf16 as its bits where w is that and HAS_BF16. w: elements of an array_of, or int8.
multiply_four, multiply_one, multiply_pair = _products_of(TILE, TILE), _products_of(1, TILE), _products_of(1, 1)


def _rows(context: Any, builder: Any, kind: Any, value: Any, count: int) -> list[Any]:
    """Return the addresses of an array's first rows."""
    array = context.make_array(kind)(context, builder, value)
    stride = cgutils.unpack_tuple(builder, array.strides)[0]
    return [cgutils.pointer_add(builder, array.data, builder.mul(stride, stride.type(n))) for n in range(count)]


def _load(builder: Any, row: Any, i: Any, kind: Any) -> Any:
    """Load a vector of a row from its number i on, as float32."""
    size = {types.float32: FLOAT, types.uint16: ir.IntType(16), types.int16: ir.HalfType(), types.int8: ir.IntType(8)}
    stored = ir.VectorType(size[kind], LANES)
    address = builder.bitcast(builder.gep(row, [i]), stored.as_pointer())
    value = builder.load(address, align=kind.bitwidth // 8)
    if kind == types.int8:
        return builder.sitofp(value, SUMS)
    if kind == types.int16:
        return builder.fpext(value, SUMS)
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, WORDS), ir.Constant(WORDS, [16] * LANES)), SUMS)
    return value


def _load_pairs(builder: Any, row: Any, i: Any, _kind: Any) -> Any:
    """Load 32 numbers of bf16, as 16 words."""
    return builder.load(builder.bitcast(builder.gep(row, [i]), WORDS.as_pointer()), align=2)


def _add(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if x.type == WORDS:
        kind = ir.FunctionType(SUMS, [SUMS, WORDS, WORDS])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, DOT_BF16), [total, x, w])
    fused = ("contract",)  # one rounding where the machine can
    return builder.fadd(total, builder.fmul(x, w, flags=fused), flags=fused)


def _ask_for(builder: Any, address: Any) -> None:
    address = builder.bitcast(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, INT32, INT32, INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(prefetch, [address, INT32(0), INT32(3), INT32(1)])


def _across(builder: Any, vectors: list[Any]) -> list[Any]:
    """Add up the lanes of each vector: returns the sums, one behind the other, in as few vectors as hold them."""
    count, lanes = len(vectors), LANES
    while lanes > 1:
        even, odd = (ir.Constant(WORDS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        vectors = [builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in (even, odd))) for a, b in pairs]
        lanes //= 2
    if count >= LANES:
        return vectors
    first = ir.Constant(ir.VectorType(INT32, count), list(range(count)))
    return [builder.shuffle_vector(vectors[0], vectors[0], first)]
