"""The format of a tile of `exp`, and what its encoder and decoder share. exponent.py draws a whole stream.

    value    s eeeeeeee mmmmmmm   --rotate left by one-->   eeeeeeee  mmmmmmms     bf16, or the high half of an fp32
             s eeeee mmmmmmmmmm   ----------------------->  eeeeemmm  mmmmmmms     fp16
                                                            exponent and extra bits, low byte

A tile is 1024 values (the last may be shorter). Its exponents are coded relative to a window of 2^k - 1 of them:

    code     0 .. 2^k - 2   the exponent: first of the window + code
             2^k - 1        escape: see its nibble
    nibble   0 .. 10        the 11 exponents below the window, downwards
             11 .. 13       the 3 above it, upwards
             14             0: zeros and denormals
             15             far: the exponent is in a byte

    record (8 bytes)   k | first | escapes, 2 bytes | far bytes, 4 bytes      k = 1 to 4
                       254 | 0 | 0 | the one value                            all values are equal: no body
                       255 | 0 | 0 | 0                                        the body is the values as they are
    body               k bit planes of the codes, and for fp16 3 more of the extra bits:
                           words of 32 bits, bit i for value 32 w + i
                       for fp32 the lowest byte of each value, then the second
                       the low byte of each value
                       nibbles in order of the values, the first in the low half of a byte
                       far bytes
                       zeros, up to a multiple of 4 bytes
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import kernel

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16] | NDArray[np.uint32]  # values, as integers

TILE = 1024
RECORD = 8
CONSTANT, RAW = 254, 255
PLANES = 4  # the most code planes
BELOW, ABOVE = 11, 3  # exponents beside the window that a nibble names
ZERO, FAR = 14, 15


@kernel
def body_bytes(n: int, itemsize: int, extra: int, mode: int, escapes: int, far: int) -> int:
    """What a tile takes before it is padded."""
    if mode == CONSTANT:
        return 0
    if mode == RAW:
        return n * itemsize
    return (n + 31) // 32 * 4 * (mode + extra) + n * (itemsize - 1) + (escapes + 1) // 2 + far


@kernel
def list_near(first: int, planes: int, near: Bytes) -> None:
    """near[nibble]: the exponent it stands for. (Those cut off at 0 or 255 are never written.)"""
    for i in range(BELOW):
        near[i] = max(first - 1 - i, 0)
    for i in range(ABOVE):
        near[BELOW + i] = min(first + (1 << planes) - 1 + i, 255)
    near[ZERO], near[FAR] = 0, 0


@kernel
def find_escapes(planes: Bytes, count: int, masks: Bytes) -> None:
    """masks: a bit for each value, 1 where it is 1 in all of the first `count` planes of `planes`."""
    size = len(masks)
    masks[:] = planes[:size]
    for p in range(1, count):
        plane = planes[p * size : (p + 1) * size]
        for i in range(size):
            masks[i] &= plane[i]


@kernel
def write_record(record: Bytes, mode: int, first: int, escapes: int, last: Any) -> None:
    record[0], record[1], record[2], record[3] = mode, first, escapes & 255, escapes >> 8
    for i in range(4):
        record[4 + i] = (last >> (8 * i)) & 255


@kernel
def read_record(record: Bytes) -> Any:
    escapes = record[2] | np.int64(record[3]) << 8
    last = record[4] | np.int64(record[5]) << 8 | np.int64(record[6]) << 16 | np.int64(record[7]) << 24
    return np.int64(record[0]), np.int64(record[1]), escapes, last
