"""The embedded code of zfp: 32 bit planes of four coefficients to a bit string that may be cut anywhere, and back.

    plane   0000   0000   0100   0110   1011   ....         highest first; a bit string fills from bit 0
    code    0      0      1001.. ......                      0: all of the rest of this plane is zero

Of a plane, the bits of the coefficients that have been non-zero so far travel as they are; then, for as long as a test
bit says that there is another 1, the bits up to and with that 1. The state is how many coefficients have been non-zero:
state and plane give the code by a table, state and code give the plane by another. From state 4 on, code and planes are
the same bits, and all that is left goes in one step. 128 bits of planes are two words: `top` (planes 31 to 16) and
`bottom`.

Source: Lindstrom 2014, "Fixed-Rate Compressed Floating-Point Arrays", section 4.4 (IEEE TVCG 20), as zfp 1.0 has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import first_one, kernel, leading_zeros, reverse_bytes

LONGEST = 7  # bits of the longest code of a plane


def list_bits(state: int, plane: int) -> list[int]:
    """Return the code of a plane, bit by bit."""
    code = [plane >> i & 1 for i in range(state)]
    while state < 4:
        code.append(int(plane >> state != 0))
        if not code[-1]:
            break
        while state < 3:  # that the fourth is a 1 goes without saying
            code.append(plane >> state & 1)
            if code[-1]:
                break
            state += 1
        state += 1
    return code


def read_bits(state: int, code: list[int]) -> tuple[int, int, int]:
    """Return (plane, next state, bits taken). A code that ends early still sets the 1 it searches for, as in zfp."""
    rest = iter(code)
    plane = sum(next(rest, 0) << i for i in range(state))
    while state < 4 and next(rest, 0):
        while state < 3 and not next(rest, 1):
            state += 1
        plane |= 1 << state
        state += 1
    return plane, state, len(code) - len(list(rest))


def encoder_table() -> NDArray[np.uint16]:
    """Tabulate [state, plane]: code | its length << 8 | next state << 12."""
    table = np.zeros((4, 16), np.uint16)
    for state, plane in np.ndindex(table.shape):
        code = list_bits(state, plane)
        bits = sum(bit << i for i, bit in enumerate(code))
        table[state, plane] = bits | len(code) << 8 | max(state, plane.bit_length()) << 12
    return table


def decoder_table() -> NDArray[np.uint16]:
    """Tabulate [bits left, at most 7; state; the next 7 bits]: plane | bits taken << 8 | next state << 12."""
    table = np.zeros((LONGEST + 1, 4, 1 << LONGEST), np.uint16)
    for left, state, bits in np.ndindex(table.shape):
        plane, following, taken = read_bits(state, [bits >> i & 1 for i in range(left)])
        table[left, state, bits] = plane | taken << 8 | following << 12
    return table


ENCODER, DECODER = encoder_table(), decoder_table()


@kernel
def shift_left(low: Any, high: Any, by: Any) -> Any:
    """Shift 128 bits, low word first, by 0 to 127."""
    if by >= np.uint64(64):
        return np.uint64(0), low << (by - np.uint64(64))
    if by == np.uint64(0):
        return low, high
    return low << by, high << by | low >> (np.uint64(64) - by)


@kernel
def shift_right(low: Any, high: Any, by: Any) -> Any:
    if by >= np.uint64(64):
        return high >> (by - np.uint64(64)), np.uint64(0)
    if by == np.uint64(0):
        return low, high
    return low >> by | high << (np.uint64(64) - by), high >> by


@kernel
def cut(low: Any, high: Any, bits: Any) -> Any:
    """Keep the first 1 to 128 bits."""
    if bits <= np.uint64(64):
        return low & np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits), np.uint64(0)
    return low, high & np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(128) - bits)


@kernel
def reverse_planes(word: Any) -> Any:
    """Reverse sixteen planes from highest first to lowest first, or back."""
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    swapped = reverse_bytes(word)
    return (swapped & low) << np.uint64(4) | swapped >> np.uint64(4) & low


@kernel
def encode_planes(bottom: Any, top: Any, budget: Any) -> Any:
    """Encode 128 bits of planes to the first `budget` (1 to 119) bits of their code, in two words."""
    zeros = leading_zeros(top) if top else np.uint64(64) + leading_zeros(bottom)
    at, low, high, state = zeros >> np.uint64(2), np.uint64(0), np.uint64(0), np.uint64(0)
    bottom, top = shift_left(bottom, top, min(zeros & np.uint64(0xFC), np.uint64(124)))
    while state < np.uint64(4) and at < budget and top | bottom:
        entry = np.uint64(ENCODER[state, top >> np.uint64(60)])
        code = entry & np.uint64(255)
        if at < np.uint64(64):
            low |= code << at
            if at > np.uint64(64 - LONGEST):
                high |= code >> (np.uint64(64) - at)
        else:
            high |= code << (at - np.uint64(64))
        at += entry >> np.uint64(8) & np.uint64(15)
        state = entry >> np.uint64(12)
        top, bottom = top << np.uint64(4) | bottom >> np.uint64(60), bottom << np.uint64(4)
    if at < budget:
        rest, more = shift_left(reverse_planes(top), reverse_planes(bottom), at)
        low, high = low | rest, high | more
    return cut(low, high, budget)


@kernel
def decode_planes(low: Any, high: Any, budget: Any) -> Any:
    """Decode `budget` bits of code to 128 bits of planes (bottom, top), as zfp's decoder does."""
    zeros = first_one(low) if low else np.uint64(64) + first_one(high)
    zeros = min(zeros, np.uint64(32))
    if zeros == np.uint64(32) or zeros >= budget:
        return np.uint64(0), np.uint64(0)
    low, high = shift_right(low, high, zeros)
    left, plane, state = budget - zeros, np.uint64(31) - zeros, np.uint64(0)
    bottom, top = np.uint64(0), np.uint64(0)
    while state < np.uint64(4) and left:
        entry = np.uint64(DECODER[min(left, np.uint64(LONGEST)), state, low & np.uint64(127)])
        bits, taken = entry & np.uint64(15), entry >> np.uint64(8) & np.uint64(15)
        if plane >= np.uint64(16):
            top |= bits << np.uint64(4) * (plane - np.uint64(16))
        else:
            bottom |= bits << np.uint64(4) * plane
        low, high = low >> taken | high << np.uint64(1) << (np.uint64(63) - taken), high >> taken
        left -= taken
        state = entry >> np.uint64(12)
        if plane == np.uint64(0):
            return bottom, top
        plane -= np.uint64(1)
    if left:
        low, high = reverse_planes(low), reverse_planes(high)
        rest, more = shift_right(high, low, np.uint64(4) * (np.uint64(31) - plane))
        bottom, top = bottom | rest, top | more
    return bottom, top
