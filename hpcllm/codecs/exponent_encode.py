"""`exp`, one tile to bytes: the format of a tile, then count exponents, choose the window, write planes and escapes.

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

Loops run over whole tiles whatever a tile's length, so that they have a fixed length and stay in vector registers; the
places past a short tile's end hold copies of its first value. exponent.py draws a whole stream, and decodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import copy_bytes, first_one, kernel, transpose_bits

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16] | NDArray[np.uint32]  # values, as integers

TILE = 1024
RECORD = 8
CONSTANT, RAW = 254, 255
PLANES = 4  # the most code planes
BELOW, ABOVE = 11, 3  # exponents beside the window that a nibble names
ZERO, FAR = 14, 15
SAMPLE = 256  # values of a tile that its window is chosen by
TABLES = 4  # histograms filled in turn: equal neighbours do not wait for each other's increment
EDGE = 16  # room beside the cumulative counts, so that no index needs clamping


@kernel
def encoder_memory() -> Any:
    """Allocate the work space of encode_tile."""
    exponents, extras, low = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    codes, bit_planes, masks = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE // 8, np.uint8)
    nibbles, fars = np.zeros(TILE + 128, np.uint8), np.empty(TILE + 1, np.uint8)
    near, names = np.empty(16, np.uint8), np.empty(256, np.uint8)
    tables, counts = np.empty((TABLES, 256), np.uint16), np.empty((2, 256 + 3 * EDGE), np.int32)
    return exponents, extras, low, codes, bit_planes, masks, nibbles, fars, near, names, tables, counts[0], counts[1]


@kernel
def encode_tile(words: Words, half: bool, record: Bytes, out: Bytes, work: Any) -> int:
    """Encode one tile into `out`, where its raw bytes and 3 more fit. Returns the bytes used, a multiple of 4."""
    n, itemsize, extra = len(words), words.itemsize, 3 if half else 0
    if is_constant(words):
        write_record(record, CONSTANT, 0, 0, np.int64(words[0]))
        return 0
    exponents, extras, low, codes, bit_planes, masks, nibbles, fars, near, names, tables, below, nonzero = work
    split(words, half, exponents, extras, low)
    planes, first = choose(exponents, tables, below, nonzero)
    write_codes(exponents, n, planes, first, codes)
    if half:
        add_extras(extras, planes, codes)
    transpose_bits(codes.view(np.uint64))
    groups = (n + 31) // 32 * 4
    plane_bytes = write_planes(codes.view(np.uint64)[:groups], planes + extra, bit_planes)
    masks[groups:] = 0
    find_escapes(bit_planes, planes, masks[:groups])
    list_near(first, planes, near)
    list_names(near, names)
    escapes, far = write_escapes(exponents, masks.view(np.uint64), names, nibbles, fars)
    if body_bytes(n, itemsize, extra, planes, escapes, far) >= n * itemsize:
        write_record(record, RAW, 0, 0, 0)
        return pad(out, copy_bytes(words.view(np.uint8), out))
    write_record(record, planes, first, escapes, far)
    at = copy_bytes(bit_planes[:plane_bytes], out)
    for shift in range(0, 8 * (itemsize - 2), 8):
        at += write_low_bytes(words, shift, out[at:])
    at += copy_bytes(low[:n], out[at:])
    at += write_nibbles(nibbles, escapes, codes, out[at:])
    at += copy_bytes(fars[:far], out[at:])
    return pad(out, at)


@kernel
def is_constant(words: Words) -> Any:
    ones, zeros = words[0], words[0]
    for i in range(len(words)):
        ones |= words[i]
        zeros &= words[i]
    return ones == zeros


@kernel
def split(words: Words, half: bool, exponents: Bytes, extras: Bytes, low: Bytes) -> None:
    """Split each value into its three parts; padded with copies of the first."""
    n = len(words)
    if words.itemsize == 4:
        for i in range(n):
            exponents[i] = np.uint8(words[i] >> np.uint32(23))
            low[i] = np.uint8(words[i] >> np.uint32(15)) & np.uint8(0xFE) | np.uint8(words[i] >> np.uint32(31))
    else:
        for i in range(n):
            exponents[i] = np.uint8(words[i] >> np.uint16(7))
            low[i] = np.uint8(words[i] << np.uint16(1)) | np.uint8(words[i] >> np.uint16(15))
    if half:
        for i in range(n):
            extras[i] = exponents[i] & np.uint8(7)
            exponents[i] >>= np.uint8(3)
    exponents[n:], extras[n:] = exponents[0], extras[0]


@kernel
def choose(exponents: Bytes, tables: NDArray[np.uint16], below: NDArray[np.int32], nonzero: NDArray[np.int32]) -> Any:
    """Choose (planes, first exponent of the window) that make the sample smallest.

    below[EDGE + e]: how many exponents are < e; nonzero: how many of them have a field other than 0
    """
    low, high = count_sample(exponents, tables)
    first, last = np.int64(low), np.int64(high)
    below[: EDGE + first + 1] = 0
    total = np.int32(0)
    for e in range(first, last + 1):
        total += np.int32(tables[0, e] + tables[1, e] + tables[2, e] + tables[3, e])
        below[EDGE + e + 1] = total
    below[EDGE + last + 2 :] = SAMPLE
    nonzero[: EDGE + 1] = 0
    for i in range(EDGE + 1, EDGE + last + 1):
        nonzero[i] = below[i] - below[EDGE + 1]
    best = np.int32(1 << 30)
    for planes in range(1, PLANES + 1):
        best = min(best, best_window(below, nonzero, planes, first, last))
    return (best >> 8) & 7, best & 255


@kernel
def best_window(below: NDArray[np.int32], nonzero: NDArray[np.int32], planes: int, first: Any, last: Any) -> Any:
    """Return the least of size in half bytes << 11 | planes << 8 | first exponent of the window."""
    width, start, count = (1 << planes) - 1, EDGE + first, last + 1 - first
    window, above = below[start : start + count], below[start + width : start + width + count]
    near, near_above = nonzero[start - BELOW :][:count], below[start + width + ABOVE :][:count]
    base = np.int32((planes * SAMPLE // 4 + 3 * SAMPLE) << 11 | planes << 8 | first)
    best = np.int32(1 << 30)
    for i in range(count):
        saved = above[i] - window[i] + 2 * (near_above[i] - near[i])
        best = min(best, np.int32(base + i - (saved << 11)))
    return best


@kernel
def count_sample(exponents: Bytes, tables: NDArray[np.uint16]) -> Any:
    """Fill the tables with histograms of the sample, to be added. Returns the lowest and highest exponent of all."""
    tables[:] = 0
    for start in range(0, TILE, TILE // SAMPLE * TABLES):
        for j in range(TABLES):
            tables[j, exponents[start + j]] += np.uint16(1)
    low, high = exponents[0], exponents[0]
    for i in range(TILE):
        low, high = min(low, exponents[i]), max(high, exponents[i])
    return low, high


@kernel
def write_codes(exponents: Bytes, n: int, planes: int, first: int, codes: Bytes) -> None:
    width, base = np.uint8((1 << planes) - 1), np.uint8(first)
    for i in range(TILE):
        codes[i] = min(np.uint8(exponents[i] - base), width)
    codes[n:] = 0


@kernel
def add_extras(extras: Bytes, planes: int, codes: Bytes) -> None:
    above = np.uint8(1 << planes)
    for i in range(TILE):
        codes[i] |= np.uint8(extras[i] * above)


@kernel
def list_names(near: Bytes, names: Bytes) -> None:
    """Set names[exponent] to its nibble."""
    names[:] = FAR
    for nibble in range(FAR):
        names[near[nibble]] = nibble


@kernel
def write_escapes(exponents: Bytes, masks: NDArray[np.uint64], names: Bytes, nibbles: Bytes, fars: Bytes) -> Any:
    """Write the exponents of masked values, in order, as nibbles, and far ones as bytes. Returns how many of each."""
    escapes, far, start = np.uint64(0), np.uint64(0), np.uint64(0)  # unsigned: no index is tested for being negative
    for w in range(len(masks)):
        mask = masks[w]
        while mask:
            exponent = exponents[start + first_one(mask)]
            mask &= mask - np.uint64(1)
            nibble = names[exponent]
            nibbles[escapes], fars[far] = nibble, exponent
            escapes += np.uint64(1)
            far += np.uint64(nibble == FAR)
        start += np.uint64(64)
    nibbles[escapes] = 0  # the second half of the last byte
    return np.int64(escapes), np.int64(far)


@kernel
def write_planes(bytes8: NDArray[np.uint64], planes: int, out: Bytes) -> int:
    """Write planes: bit i of plane p is bit p of value i's code. Returns the bytes written, for groups of 32 values."""
    size = len(bytes8)
    for p in range(planes):
        plane = out[p * size : (p + 1) * size]
        for w in range(size):
            plane[w] = np.uint8(bytes8[w] >> np.uint64(8 * p))
    return planes * size


@kernel
def write_low_bytes(words: Words, shift: int, out: Bytes) -> int:
    """Write the eight bits from `shift` of each value."""
    for i in range(len(words)):
        out[i] = np.uint8(words[i] >> shift)
    return len(words)


@kernel
def write_nibbles(nibbles: Bytes, escapes: int, pairs: Bytes, out: Bytes) -> int:
    """Pack nibbles by way of `pairs`, in whole vector registers."""
    both, size = nibbles.view(np.uint16), (escapes + 1) // 2
    for i in range((size + 63) & ~63):
        pairs[i] = np.uint8(both[i] | both[i] >> np.uint16(4))
    return copy_bytes(pairs[:size], out)


@kernel
def pad(out: Bytes, at: int) -> int:
    """Write zeros up to a multiple of 4: code planes are words of 32 bits to a GPU."""
    end = (at + 3) & ~3
    out[at:end] = 0
    return end


@kernel
def body_bytes(n: int, itemsize: int, extra: int, mode: int, escapes: int, far: int) -> int:
    """Return the size of a tile before it is padded."""
    if mode == CONSTANT:
        return 0
    if mode == RAW:
        return n * itemsize
    return (n + 31) // 32 * 4 * (mode + extra) + n * (itemsize - 1) + (escapes + 1) // 2 + far


@kernel
def list_near(first: int, planes: int, near: Bytes) -> None:
    """Set near[nibble] to its exponent. (Exponents cut off at 0 or 255 are never written.)"""
    for i in range(BELOW):
        near[i] = max(first - 1 - i, 0)
    for i in range(ABOVE):
        near[BELOW + i] = min(first + (1 << planes) - 1 + i, 255)
    near[ZERO], near[FAR] = 0, 0


@kernel
def find_escapes(planes: Bytes, count: int, masks: Bytes) -> None:
    """Set a bit of `masks` for each value that is 1 in all of the first `count` planes of `planes`."""
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
