"""`fp8:B`: 8-bit floats, e4m3 of the OCP (no infinities, one NaN, 448 at most), under one scale for B values.

    code  s eeee mmm     +-(1 + m / 8) * 2^(e - 7)      e > 0      relative error 2^-4
                         +-m * 2^-9                     e = 0      absolute error 2^-10 steps

    scale = absmax / 448, rounded to nearest, ties to even

Where int8 spends its codes evenly, these are dense near zero: better for a block with outliers, worse for an even one.
Done in integers: the same bits on every machine, and no tables.
Source: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433, section 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.blocks import Doubles, Format, Values, block_scale, steps_of
from hpcllm.codecs.kernels import bits_of, float_of, kernel, narrowed, widened

Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32]
ONE, STEPS = np.float32(1), steps_of(448)
LEAST_NORMAL = np.uint32((127 - 6) << 23)  # bits of 2^-6
BIAS = np.uint32((127 - 7) << 23)  # between the exponents of both formats
ROUND_LOW = np.float32(2.0 ** (23 - 9))  # float32 has steps of 2^-9 there
ROUND_LOW_BITS = np.uint32((127 + 23 - 9) << 23)
STEP = np.float32(2.0**-9)


@kernel
def code_of(x: np.float32) -> np.uint8:
    """|x| <= 448 * (1 + 2^-21)."""
    bits = np.uint32(bits_of(x))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    even = np.uint32((size >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(size - BIAS + np.uint32(0x7FFFF) + even) >> np.uint32(20))
    low = np.uint32(np.uint32(bits_of(float_of(size) + ROUND_LOW)) - ROUND_LOW_BITS)
    return np.uint8((low if size < LEAST_NORMAL else normal) | np.uint32((bits >> np.uint32(24)) & np.uint32(0x80)))


@kernel
def value_of(code: np.uint8) -> np.float32:
    size, sign = np.uint32(code & np.uint8(0x7F)), np.uint32(np.uint32(code & np.uint8(0x80)) << np.uint32(24))
    normal = float_of(np.uint32(np.uint32(size << np.uint32(20)) + BIAS))
    low = np.float32(np.int32(size)) * STEP
    number = low if size < np.uint32(8) else normal
    bits = bits_of(np.float32(np.nan) if size == np.uint32(0x7F) else number)
    value: np.float32 = float_of(np.uint32(bits | sign))
    return value


@kernel
def encode(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b] = scale = block_scale(part, STEPS)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = 0
        else:
            for i in range(part.size):
                code[i] = code_of(widened(part[i]) * factor)


@kernel
def decode(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        for i in range(part.size):
            part[i] = narrowed(value_of(code[i]) * scale, part[i])


@kernel
def decode_add(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        for i in range(part.size):
            part[i] += value_of(code[i]) * scale


def rounding(quotient: Doubles) -> Doubles:
    return np.maximum(quotient * 2.0**-4, 2.0**-10)


FP8 = Format(8, 448, rounding, encode, decode, decode_add)
