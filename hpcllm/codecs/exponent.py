"""`exp`: lossless. Exponents of neighbouring values are alike; sign and mantissa are noise and travel as they are.

    tile of 1024 values --> histogram of exponents --> window of 2^k - 1 of them, k = 1 to 4, that makes the tile smallest
                            value in the window: k bits; beside it: 4 more; elsewhere: 8 more

    stream   used bytes | values | record of tile 0 | record of tile 1 ... | body of tile 0 | body of tile 1 ...

A tile of one value only, such as the zeros of an embedding's untouched rows, takes its record of 8 bytes; a tile that
would not shrink is stored as it is. A tile's bytes depend on nothing outside it, and its record tells their length: tiles
are coded by several threads, or one by a GPU's block, whose 32-lane ballots give the bit planes word by word.
The exponent field of fp16 has only 5 bits; the two of its mantissa and sign that share a byte with it travel as planes.

Every bit comes back: signed zeros, denormals, payloads of NaN. Tiles are described in exponent_format.py.
Sources: the split of a bf16 into exponent and rest and its window code are those of lossless weight and gradient coding,
e.g. Zhang et al. 2025, "70% Size, 100% Accuracy" (DFloat11, arXiv:2504.11651), section 2; the format is our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.exponent_decode import decode_tile, decoder_memory
from hpcllm.codecs.exponent_encode import encode_tile, encoder_memory
from hpcllm.codecs.exponent_format import RAW, RECORD, PLANES, CONSTANT, TILE, Bytes, Words, body_bytes, read_record
from hpcllm.codecs.kernels import array_of, kernel, widened
from hpcllm.codecs.streams import HEADER_BYTES, check_whole, read_used_bytes, write_header
from hpcllm.errors import CodecError


@dataclass(frozen=True)
class Exponent:
    dtype: torch.dtype
    name: str = "exp"
    lossless: bool = True
    fixed_rate: bool = False
    block: int = TILE

    @property
    def half(self) -> bool:
        return self.dtype == torch.float16

    def encoded_bytes(self, n: int) -> int:
        last = (n % TILE * self.dtype.itemsize + 3) & ~3
        return self._table_end(n) + n // TILE * TILE * self.dtype.itemsize + last

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        return read_used_bytes(self.name, data, n, self._table_end(n), self.encoded_bytes(n))

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        n, data = values.numel(), out.numpy()
        end = self._table_end(n)
        used = end + encode_tiles(_words(values), self.half, data[HEADER_BYTES:end], data[end:])
        write_header(data, used, n)
        return out[:used]

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        table, bodies, offsets = self._open(data, out.numel())
        if out.dtype == self.dtype:
            wrong = decode_words(table, bodies, offsets, self.half, _words(out))
        else:
            wrong = self._decode_floats(table, bodies, offsets, out, False)
        self._check(wrong, out.numel())

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._check(self._decode_floats(*self._open(data, out.numel()), out, True), out.numel())

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(values)

    def _table_end(self, n: int) -> int:
        return HEADER_BYTES + -(-n // TILE) * RECORD

    def _open(self, data: torch.Tensor, n: int) -> tuple[Bytes, Bytes, NDArray[np.int64]]:
        """Its table, its bodies and where each body begins; the table has been checked."""
        check_whole(self.name, data, self.used_bytes(data, n))
        stream, end = data.numpy(), self._table_end(n)
        table, bodies, offsets = stream[HEADER_BYTES:end], stream[end:], np.empty(-(-n // TILE) + 1, np.int64)
        self._check(find_bodies(table, n, self.dtype.itemsize, 3 if self.half else 0, offsets), n)
        if offsets[-1] != len(bodies):
            raise CodecError(f"exp: the table of {n} values makes {offsets[-1]} bytes, {len(bodies)} follow it")
        return table, bodies, offsets

    def _decode_floats(
        self, table: Bytes, bodies: Bytes, offsets: NDArray[np.int64], out: torch.Tensor, add: bool
    ) -> int:
        tile = torch.empty(TILE, dtype=self.dtype)
        return decode_floats(table, bodies, offsets, self.half, _words(tile), array_of(tile), out.numpy(), add)

    def _check(self, wrong_tile: int, n: int) -> None:
        if wrong_tile >= 0:
            raise CodecError(f"exp: tile {wrong_tile} of {-(-n // TILE)} is damaged: its record cannot be")


def _words(values: torch.Tensor) -> Words:
    """Its memory as unsigned integers."""
    words: Words = array_of(values).view(f"u{values.dtype.itemsize}")
    return words


@kernel
def encode_tiles(words: Words, half: bool, table: Bytes, bodies: Bytes) -> int:
    work, used = encoder_memory(), 0
    for tile in range(len(table) // RECORD):
        part, record = words[TILE * tile : TILE * (tile + 1)], table[RECORD * tile : RECORD * (tile + 1)]
        used += encode_tile(part, half, record, bodies[used:], work)
    return used


@kernel
def find_bodies(table: Bytes, n: int, itemsize: int, extra: int, offsets: NDArray[np.int64]) -> int:
    """offsets[i]: where the body of tile i begins. Returns the first tile whose record cannot be, or -1."""
    offsets[0] = 0
    for tile in range(len(table) // RECORD):
        values = min(TILE, n - TILE * tile)
        mode, _first, escapes, last = read_record(table[RECORD * tile : RECORD * (tile + 1)])
        if mode < CONSTANT and (mode == 0 or mode > PLANES or escapes > values or last > escapes):
            return tile
        size = body_bytes(values, itemsize, extra, mode, escapes, last)
        offsets[tile + 1] = offsets[tile] + ((size + 3) & ~3)
    return -1


@kernel
def decode_words(
    table: Bytes, bodies: Bytes, offsets: NDArray[np.int64], half: bool, out: Words
) -> int:
    """Returns the first tile that no encoder wrote, or -1."""
    work = decoder_memory()
    for tile in range(len(table) // RECORD):
        record, body = table[RECORD * tile : RECORD * (tile + 1)], bodies[offsets[tile] : offsets[tile + 1]]
        if not decode_tile(record, body, half, out[TILE * tile : TILE * (tile + 1)], work):
            return tile
    return -1


@kernel
def decode_floats(
    table: Bytes,
    bodies: Bytes,
    offsets: NDArray[np.int64],
    half: bool,
    words: Words,
    values: NDArray[Any],
    out: NDArray[np.float32],
    add: bool,
) -> int:
    """The same as float32 into `out`, or added to it, by way of one tile of memory: `words` as bits, `values` as values."""
    work = decoder_memory()
    for tile in range(len(table) // RECORD):
        record, body = table[RECORD * tile : RECORD * (tile + 1)], bodies[offsets[tile] : offsets[tile + 1]]
        part = out[TILE * tile : TILE * (tile + 1)]
        if not decode_tile(record, body, half, words[: len(part)], work):
            return tile
        if add:
            for i in range(len(part)):
                part[i] += widened(values[i])
        else:
            for i in range(len(part)):
                part[i] = widened(values[i])
    return -1
