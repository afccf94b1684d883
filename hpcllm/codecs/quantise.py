"""Codes of blocks: `int8:B` and `int4:B`, whole numbers of steps, and `fp8:B`, 8-bit floats; one scale for B values.

    int8   code = -127 .. 127, two's complement            scale = absmax / 127
    int4   two codes + 8 in a byte, the first one low      scale = absmax / 7

    nearest       code = rint(value / scale), ties to even         |error| <= scale / 2 = absmax / 254 or absmax / 14
    stochastic    code = floor(value / scale + u), 0 <= u < 1      |error| <= scale, and 0 on average

-128 and -8 are never written: with symmetric codes -x becomes minus what x becomes, so nearest rounding has no bias.
value / scale is computed as value * (1 / scale), which is within 2^-22 of the quotient and has the same bits on every
machine with IEEE arithmetic. Rounding is one addition: near 1.5 * 2^23 float32 has steps of 1, and the low bits of the
sum are the code. Stochastic rounding has no state: u is a hash of a key and of the value's place, so neither threads
nor the cuts of a segmented collective change a bit:

    key, place of the block in the whole array  --mix64-->  seed of the block (64 bits)
    seed, place in the block                    --mix32-->  u (24 bits)

fp8 is e4m3 of the OCP (no infinities, one NaN, 448 at most), rounded to nearest, ties to even; scale = absmax / 448.
Where int8 spends its codes evenly, these are dense near zero: better for a block with outliers, worse for an even one.
Computed in integers: the same bits on every machine, and no tables.

    code  s eeee mmm     +-(1 + m / 8) * 2^(e - 7)      e > 0      relative error 2^-4
                         +-m * 2^-9                     e = 0      absolute error 2^-10 steps

Sources: MurmurHash3 (fmix64); C. Wellons, "Prospecting for Hash Functions", 2018 (lowbias32); Micikevicius et al. 2022,
"FP8 formats for deep learning", arXiv:2209.05433, section 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from hpcllm.codecs.blocks import Doubles, Format, Values, block_scale, steps_of
from hpcllm.codecs.kernels import FLOAT, INT32, bits_of, float_of, instruction, kernel, narrowed, widened

Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32]
ONE, TOP8, TOP4 = np.float32(1), np.float32(127), np.float32(7)
STEPS8, STEPS4 = steps_of(127), steps_of(7)
ROUND8 = np.float32(1.5 * 2**23)
ROUND4 = np.float32(1.5 * 2**23 + 8)
NIBBLE, FOUR, EIGHT = np.uint8(15), np.uint8(4), np.uint32(8)
BOTH_ZERO = np.uint8(0x88)
UNIT = np.float32(2.0**-24)
STEPS_FP8 = steps_of(448)
FP8_LEAST_NORMAL = np.uint32((127 - 6) << 23)  # bits of 2^-6
FP8_BIAS = np.uint32((127 - 7) << 23)  # between the exponents of both formats
FP8_ROUND = np.float32(2.0 ** (23 - 9))  # float32 has steps of 2^-9 there
FP8_ROUND_BITS = np.uint32((127 + 23 - 9) << 23)
FP8_STEP = np.float32(2.0**-9)


@kernel
def encode8(
    values: Values, codes: Bytes, scales: Scales, block: int, stochastic: bool = False, key: Any = 0, index: Any = 0
) -> None:
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b] = scale = block_scale(part, STEPS8)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = 0
        elif stochastic:
            seed = block_seed(np.uint64(key), np.uint64(index) + np.uint64(b * block))
            for i in range(part.size):
                code[i] = np.uint8(bits_of(random_code(part[i], factor, seed, i, TOP8) + ROUND8))
        else:
            for i in range(part.size):
                code[i] = np.uint8(bits_of(widened(part[i]) * factor + ROUND8))


@kernel
def decode8(values: Values, codes: Bytes, scales: Scales, block: int, add: bool) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        if add:
            for i in range(part.size):
                part[i] += np.float32(np.int8(code[i])) * scale
        else:
            for i in range(part.size):
                part[i] = narrowed(np.float32(np.int8(code[i])) * scale, part[i])


@kernel
def encode4(
    values: Values, codes: Bytes, scales: Scales, block: int, stochastic: bool = False, key: Any = 0, index: Any = 0
) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half]
        scales[b] = scale = block_scale(part, STEPS4)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = BOTH_ZERO
        elif stochastic:
            seed = block_seed(np.uint64(key), np.uint64(index) + np.uint64(b * block))
            for i in range(part.size // 2):
                low = bits_of(random_code(part[2 * i], factor, seed, 2 * i, TOP4) + ROUND4)
                code[i] = nibbles(low, bits_of(random_code(part[2 * i + 1], factor, seed, 2 * i + 1, TOP4) + ROUND4))
            if part.size % 2:
                low = bits_of(random_code(part[-1], factor, seed, part.size - 1, TOP4) + ROUND4)
                code[-1] = nibbles(low, EIGHT)
        else:
            for i in range(part.size // 2):
                low = bits_of(widened(part[2 * i]) * factor + ROUND4)
                code[i] = nibbles(low, bits_of(widened(part[2 * i + 1]) * factor + ROUND4))
            if part.size % 2:
                code[-1] = nibbles(bits_of(widened(part[-1]) * factor + ROUND4), EIGHT)


@kernel
def decode4(values: Values, codes: Bytes, scales: Scales, block: int, add: bool) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half], scales[b]
        pairs = part.size // 2
        if add:
            for i in range(pairs):
                part[2 * i] += low_code(code[i]) * scale
                part[2 * i + 1] += high_code(code[i]) * scale
            for i in range(2 * pairs, part.size):
                part[i] += low_code(code[-1]) * scale
        else:
            for i in range(pairs):
                part[2 * i] = narrowed(low_code(code[i]) * scale, part[2 * i])
                part[2 * i + 1] = narrowed(high_code(code[i]) * scale, part[2 * i + 1])
            for i in range(2 * pairs, part.size):
                part[i] = narrowed(low_code(code[-1]) * scale, part[i])


@kernel
def block_seed(key: np.uint64, place: np.uint64) -> np.uint64:
    return mix64(mix64(key + np.uint64(0x9E3779B97F4A7C15)) + place)


@kernel
def floor_randomly(x: np.float32, seed: np.uint64, i: int) -> np.float32:
    """Round x down or up, up with the probability of its fraction. i < 2^32."""
    bits = mix32(np.uint32(i), np.uint32(seed), np.uint32(seed >> np.uint64(32)))
    rounded: np.float32 = np.floor(x + np.float32(np.int32(bits >> np.uint32(8))) * UNIT)
    return rounded


@kernel
def mix64(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    z = (z ^ (z >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return z ^ (z >> np.uint64(33))


@kernel
def mix32(i: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """Hash i with both halves of the seed, which enter between different steps: near seeds give unrelated sequences."""
    z = np.uint32(i * np.uint32(0x9E3779B9) + low)
    z = np.uint32((z ^ (z >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ high
    z = np.uint32((z ^ (z >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(z ^ (z >> np.uint32(16)))


@kernel
def random_code(value: Values, factor: np.float32, seed: np.uint64, i: int, top: np.float32) -> np.float32:
    code = floor_randomly(widened(value) * factor, seed, i)
    return min(max(code, -top), top)  # the largest value may be a rounding error above top steps


@kernel
def nibbles(low: np.uint32, high: np.uint32) -> np.uint8:
    return np.uint8((np.uint8(low) & NIBBLE) | np.uint8(np.uint8(high) << FOUR))


def _code_of(bits: ir.Value, builder: Any) -> ir.Value:
    return builder.sitofp(builder.sub(bits, INT32(8)), FLOAT)  # numba would compute in 64 bits, half as fast


low_code = instruction(types.float32, types.uint8)(
    lambda builder, byte: _code_of(builder.and_(builder.zext(byte, INT32), INT32(15)), builder)
)
high_code = instruction(types.float32, types.uint8)(
    lambda builder, byte: _code_of(builder.lshr(builder.zext(byte, INT32), INT32(4)), builder)
)


@kernel
def fp8_code(x: np.float32) -> np.uint8:
    """Return the code of x; |x| <= 448 * (1 + 2^-21)."""
    bits = np.uint32(bits_of(x))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    even = np.uint32((size >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(size - FP8_BIAS + np.uint32(0x7FFFF) + even) >> np.uint32(20))
    low = np.uint32(np.uint32(bits_of(float_of(size) + FP8_ROUND)) - FP8_ROUND_BITS)
    return np.uint8((low if size < FP8_LEAST_NORMAL else normal) | np.uint32((bits >> np.uint32(24)) & np.uint32(0x80)))


@kernel
def fp8_value(code: np.uint8) -> np.float32:
    size, sign = np.uint32(code & np.uint8(0x7F)), np.uint32(np.uint32(code & np.uint8(0x80)) << np.uint32(24))
    normal = float_of(np.uint32(np.uint32(size << np.uint32(20)) + FP8_BIAS))
    low = np.float32(np.int32(size)) * FP8_STEP
    number = low if size < np.uint32(8) else normal
    bits = bits_of(np.float32(np.nan) if size == np.uint32(0x7F) else number)
    value: np.float32 = float_of(np.uint32(bits | sign))
    return value


@kernel
def encode_fp8(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b] = scale = block_scale(part, STEPS_FP8)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = 0
        else:
            for i in range(part.size):
                code[i] = fp8_code(widened(part[i]) * factor)


@kernel
def decode_fp8(values: Values, codes: Bytes, scales: Scales, block: int, add: bool) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        if add:
            for i in range(part.size):
                part[i] += fp8_value(code[i]) * scale
        else:
            for i in range(part.size):
                part[i] = narrowed(fp8_value(code[i]) * scale, part[i])


def fp8_error(quotient: Doubles) -> Doubles:
    return np.maximum(quotient * 2.0**-4, 2.0**-10)


def half_a_step(quotient: Doubles) -> Doubles:
    return np.full_like(quotient, 0.5)


INT8 = Format(8, 127, half_a_step, encode8, decode8)
INT4 = Format(4, 7, half_a_step, encode4, decode4)
INT8_STOCHASTIC = Format(8, 127, np.ones_like, encode8, decode8, stochastic=True)
INT4_STOCHASTIC = Format(4, 7, np.ones_like, encode4, decode4, stochastic=True)
FP8 = Format(8, 448, fp8_error, encode_fp8, decode_fp8)
