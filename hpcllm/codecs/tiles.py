"""Lossless codecs of variable rate: streams of tiles that say how long they are.

    used bytes (8) | values (8) | a record for each tile | bodies of the tiles, one behind the other

A record tells how long its tile's body is, so that whoever has the table can decode any tile. A tile's bytes depend on
nothing outside the tile. Numbers are little-endian; values and bytes may lie at any address.

Nothing in a stream is trusted: lengths and all records are checked before a value is written, and a tile's kernel
checks what is inside its body before it uses it as an index. Several threads each encode a part, as if it could not be
made smaller; then the parts are moved together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.kernels import array_of, run_in_threads
from hpcllm.errors import CodecError

Bytes = NDArray[np.uint8]
HEADER_BYTES = 16
TILES_A_THREAD = 128


@dataclass(frozen=True)
class TileFormat:
    """Format of the tiles of a codec. Kernels that decode return -1, or the first tile that no encoder wrote.

    words: values as unsigned integers of their size; half: whether they are fp16; offsets[i]: where body i begins
    """

    record_bytes: int
    most_body_bytes: Callable[[int], int]  # of a tile's bytes
    encode: Callable[..., int]  # (words, half, table, bodies) -> bytes used
    find_bodies: Callable[..., int]  # (table, n, bytes of a value, half, offsets)
    # (table, bodies, offsets, half, words), or instead of the words, a tile's memory as words and as values, add?, and
    decode: Callable[..., int]  # the float32 array that the values are written or added to


@dataclass(frozen=True)
class TileLayout:
    """Layout of a stream, on the CPU and on devices."""

    name: str
    dtype: torch.dtype
    block: int  # values of a tile
    format: TileFormat
    lossless: bool = True
    fixed_rate: bool = False

    def encoded_bytes(self, n: int) -> int:
        return self.table_end(n) + self._most_bytes(n)

    def used_bytes(self, data: torch.Tensor, n: int) -> int:
        return self.header_bytes(data, n)

    def header_bytes(self, data: torch.Tensor, n: int) -> int:
        """Read the length of the encoding of n values from its header, wherever that lies. Raises CodecError."""
        if data.numel() < HEADER_BYTES:
            raise CodecError(f"{self.name}: {data.numel()} bytes, fewer than the {HEADER_BYTES} of a header")
        used, values = map(int, data[:HEADER_BYTES].cpu().numpy().view("<u8"))
        least, most = self.table_end(n), self.encoded_bytes(n)
        if values != n or not least <= used <= most:
            raise CodecError(
                f"{self.name}: the header says {values} values in {used} bytes; expected {n}, in {least} to {most}"
            )
        return used

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(values)

    def tiles(self, n: int) -> int:
        return -(-n // self.block)

    def table_end(self, n: int) -> int:
        return HEADER_BYTES + self.tiles(n) * self.format.record_bytes

    def _most_bytes(self, n: int) -> int:
        """Return the largest size of the bodies of n values."""
        whole, rest = divmod(n, self.block)
        size = self.format.most_body_bytes
        return whole * size(self.block * self.dtype.itemsize) + size(rest * self.dtype.itemsize)


@dataclass(frozen=True)
class TileCodec(TileLayout):
    """Codec of tiles for arrays on the CPU."""

    @property
    def half(self) -> bool:
        return self.dtype == torch.float16

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        n, array, data, end = values.numel(), _words(values), out.numpy(), self.table_end(values.numel())
        table, bodies, record = data[HEADER_BYTES:end], data[end:], self.format.record_bytes

        def job(first: int, last: int) -> tuple[int, int]:
            part, start = array[first * self.block : last * self.block], self._most_bytes(first * self.block)
            return start, self.format.encode(part, self.half, table[first * record : last * record], bodies[start:])

        used = 0
        for start, size in run_in_threads(job, self.tiles(n), TILES_A_THREAD):
            if used < start:
                bodies[used : used + size] = bodies[start : start + size]
            used += size
        data[:HEADER_BYTES].view("<u8")[:] = end + used, n
        return out[: end + used]

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=False)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=True)

    def _decode(self, data: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        (table, bodies, offsets), record = self._open(data, out.numel()), self.format.record_bytes
        straight = out.dtype == self.dtype and not add
        array = _words(out) if straight else array_of(out)

        def job(first: int, last: int) -> int:
            part = array[first * self.block : last * self.block]
            memory = (part,) if straight else (*self._tile(), add, part)
            records = table[first * record : last * record]
            bad_tile = self.format.decode(records, bodies, offsets[first : last + 1], self.half, *memory)
            return bad_tile if bad_tile < 0 else first + bad_tile

        self._check(max(run_in_threads(job, len(offsets) - 1, TILES_A_THREAD)), out.numel())

    def _tile(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Allocate memory for a tile, as words and as values."""
        tile = torch.empty(self.block, dtype=self.dtype)
        return _words(tile), array_of(tile)

    def _open(self, data: torch.Tensor, n: int) -> tuple[Bytes, Bytes, NDArray[np.int64]]:
        """Return the table, checked, the bodies, and the offset of each body and of the end."""
        used, end = self.used_bytes(data, n), self.table_end(n)
        if data.numel() != used:
            raise CodecError(f"{self.name}: {data.numel()} bytes of a stream of {used}")
        stream, offsets = data.numpy(), np.empty(self.tiles(n) + 1, np.int64)
        table, bodies = stream[HEADER_BYTES:end], stream[end:]
        self._check(self.format.find_bodies(table, n, self.dtype.itemsize, self.half, offsets), n)
        if offsets[-1] != len(bodies):
            raise CodecError(f"{self.name}: the bodies of {n} values take {offsets[-1]} bytes, {len(bodies)} are there")
        return table, bodies, offsets

    def _check(self, bad_tile: int, n: int) -> None:
        if bad_tile >= 0:
            raise CodecError(f"{self.name}: tile {bad_tile} of {self.tiles(n)} is damaged: its record cannot be right")


def _words(values: torch.Tensor) -> NDArray[Any]:
    return array_of(values).view(f"u{values.dtype.itemsize}")
