"""`int8:B` and `int4:B`: a value as a whole number of steps, the step one scale for B values.

    int8   code = -127 .. 127, two's complement            scale = absmax / 127
    int4   two codes + 8 in a byte, the first one low      scale = absmax / 7

    nearest       code = rint(value / scale), ties to even         |error| <= scale / 2 = absmax / 254 or absmax / 14
    stochastic    code = floor(value / scale + u), 0 <= u < 1      |error| <= scale, and 0 on average

-128 and -8 are never written: with symmetric codes -x becomes minus what x becomes, so nearest rounding has no bias.
value / scale is computed as value * (1 / scale), which is within 2^-22 of the quotient and has the same bits on every
machine with IEEE arithmetic. Rounding is one addition: near 1.5 * 2^23 float32 has steps of 1, and the low bits of the
sum are the code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.blocks import Doubles, Format, Values, block_scale, steps_of
from hpcllm.codecs.kernels import bits_of, kernel, narrowed, widened
from hpcllm.codecs.rounding import block_seed, floor_randomly

Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32]
ONE, TOP8, TOP4 = np.float32(1), np.float32(127), np.float32(7)
STEPS8, STEPS4 = steps_of(127), steps_of(7)
ROUND8 = np.float32(1.5 * 2**23)
ROUND4 = np.float32(1.5 * 2**23 + 8)
NIBBLE, FOUR, EIGHT = np.uint8(15), np.uint8(4), np.int32(8)
BOTH_ZERO = np.uint8(0x88)


@kernel
def encode8(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b] = scale = block_scale(part, STEPS8)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = 0
        else:
            for i in range(part.size):
                code[i] = np.uint8(bits_of(widened(part[i]) * factor + ROUND8))


@kernel
def encode8_stochastic(
    values: Values, codes: Bytes, scales: Scales, block: int, key: np.uint64, index: np.uint64
) -> None:
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b] = scale = block_scale(part, STEPS8)
        factor, seed = ONE / scale, block_seed(key, index + np.uint64(b * block))
        if np.isnan(scale):
            code[:] = 0
        else:
            for i in range(part.size):
                code[i] = np.uint8(bits_of(random_code(part[i], factor, seed, i, TOP8) + ROUND8))


@kernel
def decode8(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        for i in range(part.size):
            part[i] = narrowed(np.float32(np.int8(code[i])) * scale, part[i])


@kernel
def decode8_add(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block], scales[b]
        for i in range(part.size):
            part[i] += np.float32(np.int8(code[i])) * scale


@kernel
def encode4(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half]
        scales[b] = scale = block_scale(part, STEPS4)
        factor = ONE / scale
        if np.isnan(scale):
            code[:] = BOTH_ZERO
        else:
            for i in range(part.size // 2):
                low = bits_of(widened(part[2 * i]) * factor + ROUND4)
                code[i] = nibbles(low, bits_of(widened(part[2 * i + 1]) * factor + ROUND4))
            if part.size % 2:
                code[-1] = nibbles(bits_of(widened(part[-1]) * factor + ROUND4), np.uint32(EIGHT))


@kernel
def encode4_stochastic(
    values: Values, codes: Bytes, scales: Scales, block: int, key: np.uint64, index: np.uint64
) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half]
        scales[b] = scale = block_scale(part, STEPS4)
        factor, seed = ONE / scale, block_seed(key, index + np.uint64(b * block))
        if np.isnan(scale):
            code[:] = BOTH_ZERO
        else:
            for i in range(part.size // 2):
                low = bits_of(random_code(part[2 * i], factor, seed, 2 * i, TOP4) + ROUND4)
                code[i] = nibbles(low, bits_of(random_code(part[2 * i + 1], factor, seed, 2 * i + 1, TOP4) + ROUND4))
            if part.size % 2:
                low = bits_of(random_code(part[-1], factor, seed, part.size - 1, TOP4) + ROUND4)
                code[-1] = nibbles(low, np.uint32(EIGHT))


@kernel
def decode4(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half], scales[b]
        for i in range(part.size // 2):
            part[2 * i] = narrowed(low_code(code[i]) * scale, part[2 * i])
            part[2 * i + 1] = narrowed(high_code(code[i]) * scale, part[2 * i + 1])
        if part.size % 2:
            part[-1] = narrowed(low_code(code[-1]) * scale, part[-1])


@kernel
def decode4_add(values: Values, codes: Bytes, scales: Scales, block: int) -> None:
    half = block // 2
    for b in range(scales.size):
        part, code, scale = values[b * block : (b + 1) * block], codes[b * half : (b + 1) * half], scales[b]
        for i in range(part.size // 2):
            part[2 * i] += low_code(code[i]) * scale
            part[2 * i + 1] += high_code(code[i]) * scale
        if part.size % 2:
            part[-1] += low_code(code[-1]) * scale


@kernel
def random_code(value: Values, factor: np.float32, seed: np.uint64, i: int, top: np.float32) -> np.float32:
    code = floor_randomly(widened(value) * factor, seed, i)
    return min(max(code, -top), top)  # the largest value may be a rounding error above top steps


@kernel
def nibbles(low: np.uint32, high: np.uint32) -> np.uint8:
    return np.uint8((np.uint8(low) & NIBBLE) | np.uint8(np.uint8(high) << FOUR))


@kernel
def low_code(byte: np.uint8) -> np.float32:
    return np.float32(np.int32(byte & NIBBLE) - EIGHT)


@kernel
def high_code(byte: np.uint8) -> np.float32:
    return np.float32(np.int32(byte >> FOUR) - EIGHT)


def half_a_step(quotient: Doubles) -> Doubles:
    return np.full_like(quotient, 0.5)


INT8 = Format(8, 127, half_a_step, encode8, decode8, decode8_add)
INT4 = Format(4, 7, half_a_step, encode4, decode4, decode4_add)
INT8_STOCHASTIC = Format(8, 127, np.ones_like, encode8_stochastic, decode8, decode8_add, stochastic=True)
INT4_STOCHASTIC = Format(4, 7, np.ones_like, encode4_stochastic, decode4, decode4_add, stochastic=True)
