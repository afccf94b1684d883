"""`exp`: lossless. Exponents of neighbouring values are alike; sign and mantissa are noise and travel as they are.

    tile of 1024 values --> counts of exponents --> a window of 2^k - 1 of them, k = 1 to 4, that makes the tile small
                            in the window: k bits; beside it: 4 more; elsewhere: 8 more

A tile of one value only, such as the zeros of an embedding's untouched rows, takes its record of 8 bytes; a tile that
would not shrink is stored as it is. On a GPU a block takes a tile; ballots over 32 lanes are the words of the planes.
The exponent field of fp16 has only 5 bits; the two of its mantissa and sign that share a byte with it travel as planes.

Every bit comes back: signed zeros, denormals, payloads of NaN. exponent_encode.py describes the bytes of a tile and
writes them, tiles.py the stream of tiles; this file reads tiles. Nothing in the bytes is trusted: the size of a body
follows from its record and has been held against the stream's; here the masked values and the far nibbles are counted
before one of them is used as an index. Source: that of a bf16 only the exponent shrinks is the observation of Zhang et
al. 2025, "70% Size, 100% Accuracy" (DFloat11, arXiv:2504.11651), section 2; windows and escapes instead of Huffman
codes are for vector units and GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.exponent_encode import (
    CONSTANT,
    FAR,
    PLANES,
    RAW,
    RECORD,
    TILE,
    Bytes,
    Words,
    body_bytes,
    encode_tile,
    encoder_memory,
    find_escapes,
    list_near,
)  # fmt: skip
from hpcllm.codecs.kernels import copy_bytes, count_ones, first_one, kernel, put_floats, transpose_bits
from hpcllm.codecs.tiles import TileFormat


@kernel
def encode_tiles(words: Words, half: bool, table: Bytes, bodies: Bytes) -> int:
    work, used = encoder_memory(), 0
    for tile in range(len(table) // RECORD):
        part, record = words[TILE * tile : TILE * (tile + 1)], table[RECORD * tile : RECORD * (tile + 1)]
        used += encode_tile(part, half, record, bodies[used:], work)
    return used


@kernel
def find_bodies(table: Bytes, n: int, itemsize: int, half: bool, offsets: NDArray[np.int64]) -> int:
    offsets[0] = 0
    for tile in range(len(table) // RECORD):
        values = min(TILE, n - TILE * tile)
        mode, _first, escapes, last = read_record(table[RECORD * tile : RECORD * (tile + 1)])
        if mode not in (CONSTANT, RAW) and not (1 <= mode <= PLANES and last <= escapes <= values):
            return tile
        size = body_bytes(values, itemsize, 3 if half else 0, mode, escapes, last)
        offsets[tile + 1] = offsets[tile] + ((size + 3) & ~3)
    return -1


@kernel
def decode_tiles(
    table: Bytes, bodies: Bytes, offsets: NDArray[np.int64], half: bool, words: Words, values: Any = None,
    add: bool = False, floats: Any = None,
) -> int:  # fmt: skip
    work = decoder_memory()
    for tile in range(len(table) // RECORD):
        start, end = TILE * tile, TILE * (tile + 1)
        record, body = table[RECORD * tile : RECORD * (tile + 1)], bodies[offsets[tile] : offsets[tile + 1]]
        part = words[start:end] if floats is None else words[: len(floats) - start]
        if not decode_tile(record, body, half, part, work):
            return tile
        if floats is not None:
            put_floats(values, add, floats[start:end])
    return -1


@kernel
def decoder_memory() -> Any:
    """Allocate the work space of decode_tile."""
    exponents, extras, codes = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    return exponents, extras, codes, np.empty(TILE // 8, np.uint8), np.empty(TILE + 1, np.uint8), np.empty(16, np.uint8)


@kernel
def decode_tile(record: Bytes, body: Bytes, half: bool, words: Words, work: Any) -> bool:
    """Decode one tile to `words`. Returns False if escapes and record disagree: then nothing is written."""
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
    """Read a byte for each value, bit p from plane p."""
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
    """Unpack nibbles; returns how many of them are FAR."""
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
    """Set the exponents of masked values. The numbers of nibbles and of far bytes have been checked."""
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
    """Rotate mmmmmmms to s00000000mmmmmmm."""
    return np.uint16(np.uint16(low) >> np.uint16(1)) | np.uint16(np.uint16(low) << np.uint16(15))


@kernel
def read_record(record: Bytes) -> Any:
    escapes = record[2] | np.int64(record[3]) << 8
    last = record[4] | np.int64(record[5]) << 8 | np.int64(record[6]) << 16 | np.int64(record[7]) << 24
    return np.int64(record[0]), np.int64(record[1]), escapes, last


EXPONENT = TileFormat(
    record_bytes=RECORD,
    most_body_bytes=lambda value_bytes: (value_bytes + 3) & ~3,
    encode=encode_tiles,
    find_bodies=find_bodies,
    decode=decode_tiles,
)
