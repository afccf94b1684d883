"""Blocks of `zfp`: four values to a fixed number of bits and back. zfp.py draws the whole.

    x[4] --one exponent--> integers --lift--> coefficients --negabinary--> 32 planes of 4 bits --code, cut--> bits

Planes are coded from the highest. Of a plane, the bits of the coefficients that have been non-zero so far travel as they
are; then, as long as a test bit says that there is another 1, zeros up to and with that 1. A state is how many
coefficients have been non-zero: with it and the four bits of a plane a table gives the bits to write, and the other way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import bits_of, float_of, kernel

Longs = NDArray[np.uint64]
HEADER_BITS = 9  # 1 for a block that is not all zeros, 8 of exponent + 127
NON_FINITE = np.uint64(1)  # exponent field 0 in a block that is not zero: the library never writes it
LEAST_FIELD = np.uint32(29)  # of 2^-98, below which the library's scale overflows
NEGABINARY = np.uint32(0xAAAAAAAA)


def plane_codes() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """For [state, plane]: the bits of that plane, the first lowest; how many they are; the next state."""
    bits, lengths, states = (np.zeros((5, 16), np.uint8) for _ in range(3))
    for state in range(5):
        for plane in range(16):
            code = list_bits(state, plane)
            bits[state, plane] = sum(bit << i for i, bit in enumerate(code))
            lengths[state, plane], states[state, plane] = len(code), max(state, plane.bit_length())
    return bits, lengths, states


def list_bits(state: int, plane: int) -> list[int]:
    code = [plane >> i & 1 for i in range(state)]
    while state < 4:
        code.append(int(plane >> state != 0))
        if not code[-1]:
            break
        while state < 3:  # that the last one is a 1 goes without saying
            code.append(plane >> state & 1)
            if code[-1]:
                break
            state += 1
        state += 1
    return code


CODE_BITS, CODE_LENGTHS, NEXT_STATES = plane_codes()
