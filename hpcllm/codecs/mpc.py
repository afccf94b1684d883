"""`mpc`: lossless. Differences, a bit transpose that gathers what the exponents have in common, and no zero words.

    tile of 1024 words of 32 bits (one fp32, or two 16-bit values)
      x --LNVd--> x[i] - x[i-1] --BIT--> word l of each 32: bit l of each --LNV1--> t[i] - t[i-1] --ZE--> bitmap, others

    record (4 bytes)   how many words are not zero
    body               a bit for each word: not zero? in words of 32 bits; then those words, in order

The four stages are those of MPC with dimension 1; differences do not cross a tile's border and words past the end are
zero. Random mantissas do not shrink: 1.1 times on fp32 gradients. It is here as the lossless baseline of other work.
Source: Yang, Mukka, Hesaaraki and Burtscher 2015, "MPC: A Massively Parallel Compression Algorithm for Scientific Data"
(IEEE Cluster 2015), section III. Its single stream has no offsets of tiles; ours has the table of tiles.py instead.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import copy_bytes, count_ones, kernel, put_floats
from hpcllm.codecs.tiles import TileFormat

Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint32]

TILE = 1024
TILE_BYTES = 4 * TILE
RECORD = 4
# In the work space word i of a tile is at [i % 32, i // 32]: a row has the same lane of every group of 32 words, so
# that the transpose works on whole rows.


@kernel
def encode_tiles(values: NDArray[Any], _half: bool, table: Bytes, bodies: Bytes) -> int:
    data, lanes, tile_words = values.view(np.uint8), np.empty((32, 32), np.uint32), np.empty(TILE, np.uint32)
    stage, used = np.empty(32 + TILE + 1, np.uint32), 0
    for tile in range(len(table) // RECORD):
        part = data[TILE_BYTES * tile : TILE_BYTES * (tile + 1)]
        tile_words[len(part) // 4 :] = 0
        copy_bytes(part, tile_words.view(np.uint8))
        groups = (len(part) + 127) // 128
        subtract(tile_words, (len(part) + 3) // 4, lanes)
        transpose(lanes)
        count = pack(lanes, groups, stage)
        for i in range(RECORD):
            table[RECORD * tile + i] = count >> 8 * i & 255
        used += copy_bytes(stage.view(np.uint8)[: 4 * (groups + count)], bodies[used:])
    return used


@kernel
def subtract(words: Words, n: int, lanes: Words) -> None:
    """Compute differences to the word before, laid out in lanes."""
    lanes[:] = 0
    before = np.uint32(0)
    for i in range(n):
        lanes[i & 31, i >> 5] = words[i] - before
        before = words[i]


@kernel
def transpose(lanes: Words) -> None:
    """Exchange bit j of word i and bit i of word j, in each group of 32 words: blocks of 16 bits, 8, .., 1."""
    flat = lanes.ravel()
    for distance, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        size = 32 * distance
        for start in range(0, TILE, 2 * size):
            exchange(flat[start : start + size], flat[start + size : start + 2 * size], distance, mask)


@kernel
def exchange(low: Words, high: Words, by: int, mask: int) -> None:
    shift, kept = np.uint32(by), np.uint32(mask)
    for i in range(len(low)):
        swap = np.uint32((low[i] >> shift ^ high[i]) & kept)
        low[i] ^= np.uint32(swap << shift)
        high[i] ^= swap


@kernel
def pack(lanes: Words, groups: int, out: Words) -> int:
    """Write bitmap and words of the differences between neighbours. Returns how many words are not zero."""
    at, before = groups, np.uint32(0)
    for g in range(groups):
        bitmap = np.uint32(0)
        for lane in range(32):
            word = np.uint32(lanes[lane, g] - before)
            before = lanes[lane, g]
            out[at] = word
            at += word != 0
            bitmap |= np.uint32(word != 0) << np.uint32(lane)
        out[g] = bitmap
    return at - groups


@kernel
def find_bodies(table: Bytes, n: int, itemsize: int, _half: bool, offsets: NDArray[np.int64]) -> int:
    offsets[0], n_bytes = 0, n * itemsize
    for tile in range(len(table) // RECORD):
        groups = (min(TILE_BYTES, n_bytes - TILE_BYTES * tile) + 127) // 128
        record = table[RECORD * tile : RECORD * (tile + 1)]
        count = record[0] | np.int64(record[1]) << 8 | np.int64(record[2]) << 16 | np.int64(record[3]) << 24
        if count > 32 * groups:
            return tile
        offsets[tile + 1] = offsets[tile] + 4 * (groups + count)
    return -1


@kernel
def decode_tile(body: Bytes, groups: int, stage: Words, lanes: Words, out: Bytes) -> bool:
    """Decode one tile. Returns False if the bitmap and the record disagree: then nothing is written."""
    copy_bytes(body, stage.view(np.uint8))
    ones = np.uint64(0)
    for g in range(groups):
        ones += count_ones(np.uint64(stage[g]))
    if np.int64(ones) != len(body) // 4 - groups:
        return False
    unpack(stage, groups, lanes)
    transpose(lanes)
    add_up(lanes, stage)
    copy_bytes(stage.view(np.uint8)[: len(out)], out)
    return True


@kernel
def unpack(stage: Words, groups: int, lanes: Words) -> None:
    at, word = np.uint64(groups), np.uint32(0)
    lanes[:, groups:] = 0
    for g in range(groups):
        bitmap = stage[g]
        for lane in range(32):
            there = bitmap >> np.uint32(lane) & np.uint32(1)
            word += np.uint32(stage[at] * there)
            lanes[lane, g] = word
            at += np.uint64(there)


@kernel
def add_up(lanes: Words, out: Words) -> None:
    word = np.uint32(0)
    for i in range(TILE):
        word += lanes[i & 31, i >> 5]
        out[i] = word


@kernel
def decode_tiles(
    table: Bytes, bodies: Bytes, offsets: NDArray[np.int64], _half: bool, words: NDArray[Any], values: Any = None,
    add: bool = False, floats: Any = None,
) -> int:  # fmt: skip
    lanes, stage = np.empty((32, 32), np.uint32), np.empty(32 + TILE + 1, np.uint32)
    block = TILE_BYTES // words.itemsize
    for tile in range(len(table) // RECORD):
        start, end = block * tile, block * (tile + 1)
        part = words[start:end] if floats is None else words[: len(floats) - start]
        data, body = part.view(np.uint8), bodies[offsets[tile] : offsets[tile + 1]]
        if not decode_tile(body, (len(data) + 127) // 128, stage, lanes, data):
            return tile
        if floats is not None:
            put_floats(values, add, floats[start:end])
    return -1


MPC = TileFormat(
    record_bytes=RECORD,
    most_body_bytes=lambda value_bytes: -(-value_bytes // 128) * 132,
    encode=encode_tiles,
    find_bodies=find_bodies,
    decode=decode_tiles,
)
