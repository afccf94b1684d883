"""`exp`: lossless. Exponents of neighbouring values are alike; sign and mantissa are noise and travel as they are.

    tile of 1024 values --> counts of exponents --> a window of 2^k - 1 of them, k = 1 to 4, that makes the tile small
                            in the window: k bits; beside it: 4 more; elsewhere: 8 more

A tile of one value only, such as the zeros of an embedding's untouched rows, takes its record of 8 bytes; a tile that
would not shrink is stored as it is. On a GPU a block takes a tile; ballots over 32 lanes are the words of the planes.
The exponent field of fp16 has only 5 bits; the two of its mantissa and sign that share a byte with it travel as planes.

Every bit comes back: signed zeros, denormals, payloads of NaN. The bytes of a tile are described in
exponent_format.py, the stream of tiles in streams.py.
Source: that of a bf16 only the exponent shrinks is the observation of Zhang et al. 2025, "70% Size, 100% Accuracy"
(DFloat11, arXiv:2504.11651), section 2; windows and escapes instead of Huffman codes are for vector units and GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.bits import put_floats
from hpcllm.codecs.exponent_decode import decode_tile, decoder_memory
from hpcllm.codecs.exponent_encode import encode_tile, encoder_memory
from hpcllm.codecs.exponent_format import CONSTANT, PLANES, RAW, RECORD, TILE, Bytes, Words, body_bytes, read_record
from hpcllm.codecs.kernels import kernel
from hpcllm.codecs.streams import TileFormat


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
def decode_tiles(table: Bytes, bodies: Bytes, offsets: NDArray[np.int64], half: bool, out: Words) -> int:
    work = decoder_memory()
    for tile in range(len(table) // RECORD):
        record, body = table[RECORD * tile : RECORD * (tile + 1)], bodies[offsets[tile] : offsets[tile + 1]]
        if not decode_tile(record, body, half, out[TILE * tile : TILE * (tile + 1)], work):
            return tile
    return -1


@kernel
def decode_tiles_to_floats(
    table: Bytes,
    bodies: Bytes,
    offsets: NDArray[np.int64],
    half: bool,
    out: NDArray[np.float32],
    words: Words,
    values: NDArray[Any],
    add: bool,
) -> int:
    work = decoder_memory()
    for tile in range(len(table) // RECORD):
        record, body = table[RECORD * tile : RECORD * (tile + 1)], bodies[offsets[tile] : offsets[tile + 1]]
        part = out[TILE * tile : TILE * (tile + 1)]
        if not decode_tile(record, body, half, words[: len(part)], work):
            return tile
        put_floats(values, add, part)
    return -1


EXPONENT = TileFormat(
    record_bytes=RECORD,
    most_body_bytes=lambda value_bytes: (value_bytes + 3) & ~3,
    encode=encode_tiles,
    find_bodies=find_bodies,
    decode=decode_tiles,
    decode_floats=decode_tiles_to_floats,
)
