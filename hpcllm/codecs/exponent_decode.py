"""`exp`, bytes to one tile. Format: exponent_format.py.

Nothing in the bytes is trusted: the size of a body follows from its record and has been held against the stream's;
here the masked values and the far nibbles are counted before one of them is used as an index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.bits import copy_bytes, count_ones, first_one, transpose_bits
from hpcllm.codecs.exponent_format import (
    CONSTANT,
    FAR,
    RAW,
    TILE,
    Bytes,
    Words,
    find_escapes,
    list_near,
    read_record,
)
from hpcllm.codecs.kernels import kernel


@kernel
def decoder_memory() -> Any:
    """Work space of decode_tile."""
    exponents, extras, codes = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    return exponents, extras, codes, np.empty(TILE // 8, np.uint8), np.empty(TILE + 1, np.uint8), np.empty(16, np.uint8)


@kernel
def decode_tile(record: Bytes, body: Bytes, half: bool, words: Words, work: Any) -> bool:
    """One tile to `words`. False if escapes and record disagree: then nothing is written."""
    n, (planes, first, escapes, last) = len(words), read_record(record)
    if planes == CONSTANT:
        words[:] = last
        return True
    if planes == RAW:
        copy_bytes(body[: n * words.itemsize], words.view(np.uint8))
        return True
    groups = (n + 31) // 32 * 4
    exponents, extras, codes, masks, nibbles, near = work
    at = groups * (planes + (3 if half else 0))
    low, at = at, at + n * (words.itemsize - 1)
    fars = at + (escapes + 1) // 2
    masks[groups:] = 0
    find_escapes(body, planes, masks[:groups])
    if count_ones_of(masks.view(np.uint64)) != escapes or read_nibbles(body[at:fars], nibbles) != last:
        return False
    read_planes(body[: groups * planes], codes.view(np.uint64)[:groups])
    put_codes(codes, first, exponents)
    list_near(first, planes, near)
    put_escapes(exponents, masks.view(np.uint64), near, nibbles, body[fars:])
    if half:
        read_planes(body[groups * planes : low], extras.view(np.uint64)[:groups])
        put_extras(extras, exponents)
    put_words(exponents, body[low:at], words)
    return True


@kernel
def read_planes(planes: Bytes, bytes8: NDArray[np.uint64]) -> None:
    """A byte a value, bit p from plane p."""
    size = len(bytes8)
    bytes8[:] = 0
    for p in range(len(planes) // size):
        plane = planes[p * size : (p + 1) * size]
        for w in range(size):
            bytes8[w] |= np.uint64(plane[w]) << np.uint64(8 * p)
    transpose_bits(bytes8)


@kernel
def count_ones_of(masks: NDArray[np.uint64]) -> Any:
    count = np.uint64(0)
    for w in range(len(masks)):
        count += count_ones(masks[w])
    return np.int64(count)


@kernel
def read_nibbles(data: Bytes, nibbles: Bytes) -> int:
    """Returns how many of them are FAR."""
    far = 0
    for i in range(len(data)):
        nibbles[2 * i], nibbles[2 * i + 1] = data[i] & 15, data[i] >> 4
        far += (data[i] & 15 == FAR) + (data[i] >> 4 == FAR)
    return far


@kernel
def put_codes(codes: Bytes, first: int, exponents: Bytes) -> None:
    base = np.uint8(first)
    for i in range(TILE):
        exponents[i] = np.uint8(codes[i] + base)


@kernel
def put_extras(extras: Bytes, exponents: Bytes) -> None:
    for i in range(TILE):
        exponents[i] = np.uint8(exponents[i] << np.uint8(3)) | extras[i]


@kernel
def put_escapes(exponents: Bytes, masks: NDArray[np.uint64], near: Bytes, nibbles: Bytes, fars: Bytes) -> None:
    """The exponents of masked values. That there are as many nibbles, and a far byte for each FAR, has been checked."""
    escape, far, start = np.uint64(0), np.uint64(0), np.uint64(0)
    for w in range(len(masks)):
        mask = masks[w]
        while mask:
            nibble = nibbles[escape]
            exponent = near[nibble]
            if nibble == FAR:
                exponent = fars[far]
                far += np.uint64(1)
            exponents[start + first_one(mask)] = exponent
            mask &= mask - np.uint64(1)
            escape += np.uint64(1)
        start += np.uint64(64)


@kernel
def put_words(high: Bytes, low: Bytes, words: Words) -> None:
    """Rotate back; for fp32 the two lowest bytes come first in `low`."""
    n = len(words)
    last = low[len(low) - n :]
    if words.itemsize == 2:
        for i in range(n):
            words[i] = np.uint16(np.uint16(high[i]) << np.uint16(7)) | np.uint16(rotated(last[i]))
    else:
        lowest, second = low[:n], low[n : 2 * n]
        for i in range(n):
            top = np.uint32(high[i]) << np.uint32(23) | np.uint32(rotated(last[i])) << np.uint32(16)
            words[i] = top | np.uint32(second[i]) << np.uint32(8) | np.uint32(lowest[i])


@kernel
def rotated(low: int) -> np.uint16:
    """mmmmmmms -> s00000000mmmmmmm"""
    return np.uint16(np.uint16(low) >> np.uint16(1)) | np.uint16(np.uint16(low) << np.uint16(15))
