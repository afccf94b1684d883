"""`zfp:rate`: blocks of four values in exactly 4 x rate bits, the 1-D fixed-rate stream of the zfp library, no header.

    x0 x1 x2 x3 --> common exponent e --> integers x 2^(30-e) --> lifted transform --> base -2 --> bit planes, cut off

    bits        0                     there is nothing but zeros in this block
                1 | e + 127 (8 bits) | planes from the highest, coded in zfp_planes.py, up to 4 x rate bits

Bit for bit what zfp 1.0 writes and reads for float32, in words of 64 bits; 16-bit values are widened first. Two rules
are our own, where the library's behaviour is undefined or destroys values:
- a block whose largest magnitude is below 2^-98 is written as zeros (the library's scale factor overflows there);
- a block with a NaN or an infinity decodes to four NaN: its header is 1 with exponent field 0, as no library writes it.

Each step runs over a chunk of 256 blocks before the next: all but the coding of planes then work in vector registers.
A chunk is a whole number of 64-bit words at every rate, so chunks are coded independently, by several threads:

    values --pad--> floats --one exponent, lift, negabinary--> planes --code--> bits --> words of 64

Planes are cut off, not rounded, so that the error has a bias. There is no gain over block integers on gradients, whose
neighbours are unrelated: this codec is here for what it is compatible with.
Source: Lindstrom 2014, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20, section 4; zfp 1.0's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.kernels import array_of, bits_of, copy_bytes, float_of, kernel, put_floats, run_in_threads
from hpcllm.codecs.zfp_planes import cut, decode_planes, encode_planes, shift_left, shift_right
from hpcllm.errors import CodecError

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Fields: TypeAlias = NDArray[np.uint32]
Longs: TypeAlias = NDArray[np.uint64]

CHUNK = 1024
BLOCKS = CHUNK // 4
HEADER_BITS = np.uint64(9)  # the lowest says that there is more to come; 8 bits of exponent + 127
NOT_FINITE = np.uint32(1)  # more to come, but exponent field 0: no zfp encoder writes it
LEAST = np.uint32((127 - 98) << 23)  # 2^-98: below it zfp's own scale factor overflows
INFINITY = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
NEGABINARY = np.uint32(0xAAAAAAAA)
CHUNKS_A_THREAD = 64
LEAST_PEAK = 2.0**-98
ROUNDING_UNITS = 80.0  # 16 for what the transforms shift out, 64 for 31 bits that become a float32


@dataclass(frozen=True)
class ZfpLayout:
    """Layout of zfp's stream, on the CPU and on devices. rate: bits a value, 3 to 32."""

    name: str
    dtype: torch.dtype
    rate: int
    lossless: bool = False
    fixed_rate: bool = True
    block: int = 64  # values in a whole number of 64-bit words at every rate: parts make the same bytes as the whole

    def encoded_bytes(self, n: int) -> int:
        return (-(-n // 4) * 4 * self.rate + 63) // 64 * 8

    def used_bytes(self, data: torch.Tensor, n: int) -> int:  # noqa: ARG002 -- the same for all bytes
        return self.encoded_bytes(n)

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bound on the error, relative to the block.

        From rate 7 on it is 3.75 x 2^(5 - rate) x the power of two above the largest magnitude of the block:
        rate - 3 planes always fit (p of them take 4 p + 3 bits at most); the digits below differ by less than
        2^(35 - rate), and a row of the inverse transform adds up to 3.75. Below rate 7 that sum may wrap around, and
        what comes back is anything that an integer of 32 bits can be. Infinite where the dtype may overflow, or where
        another value of the block is not finite.
        """
        starts = np.arange(0, values.size, 4)
        peaks = np.maximum.reduceat(np.abs(values), starts) if values.size else values  # a NaN wins
        peak = np.where(np.isfinite(peaks), peaks, np.inf).repeat(4)[: values.size]
        units = (3.75 * 2.0 ** (35 - self.rate) if self.rate >= 7 else 3 * 2.0**30) + ROUNDING_UNITS
        error = np.where(peak < LEAST_PEAK, peak, units * np.exp2(np.floor(np.log2(np.maximum(peak, LEAST_PEAK))) - 29))
        info = torch.finfo(self.dtype)
        error += (np.abs(values) + error) * info.eps / 2 + info.smallest_normal * info.eps
        return np.where(np.abs(values) + error > info.max, np.inf, error)

    def check_length(self, data: torch.Tensor, out: torch.Tensor) -> None:
        n = out.numel()
        if data.numel() != self.encoded_bytes(n):
            raise CodecError(f"{self.name}: {data.numel()} bytes for {n} values, which take {self.encoded_bytes(n)}")


@dataclass(frozen=True)
class Zfp(ZfpLayout):
    """Codec zfp for arrays on the CPU."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        data = out[: self.encoded_bytes(values.numel())]
        self._run(lambda part, code: encode_chunks(part, 4 * self.rate, code), data, values)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=False)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=True)

    def _decode(self, data: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        self.check_length(data, out)
        self._run(lambda part, code: decode_chunks(code, 4 * self.rate, add, part), data, out)

    def _run(self, job: Callable[..., None], data: torch.Tensor, values: torch.Tensor) -> None:
        """Run job(values, bytes) over parts of whole chunks, one for each thread."""
        array, code = array_of(values), data.numpy()
        chunk_bytes = CHUNK * self.rate // 8

        def run(first: int, last: int) -> None:
            job(array[first * CHUNK : last * CHUNK], code[first * chunk_bytes : last * chunk_bytes])

        run_in_threads(run, -(-array.size // CHUNK), CHUNKS_A_THREAD)


@kernel
def chunk_memory() -> Any:
    """Allocate floats, headers, planes (bottom, top), words of bits and three more that may be read beside them."""
    planes = np.empty((2, BLOCKS), np.uint64)
    return np.empty(CHUNK, np.float32), np.empty(BLOCKS, np.uint32), planes[0], planes[1], np.empty(515, np.uint64)


@kernel
def encode_chunks(values: NDArray[Any], block_bits: int, out: Bytes) -> None:
    floats, headers, bottoms, tops, words = chunk_memory()
    chunk_bytes = BLOCKS * block_bits // 8
    for chunk in range((len(values) + CHUNK - 1) // CHUNK):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        data, blocks = out[chunk * chunk_bytes : (chunk + 1) * chunk_bytes], (len(part) + 3) // 4
        load(part, floats)
        split(floats, blocks, headers, bottoms, tops)
        write_blocks(headers, bottoms, tops, blocks, np.uint64(block_bits), words)
        copy_bytes(words.view(np.uint8)[: len(data)], data)


@kernel
def decode_chunks(data: Bytes, block_bits: int, add: bool, out: NDArray[Any]) -> None:
    (floats, headers, bottoms, tops, words), chunk_bytes = chunk_memory(), BLOCKS * block_bits // 8
    for chunk in range((len(out) + CHUNK - 1) // CHUNK):
        part = out[chunk * CHUNK : (chunk + 1) * CHUNK]
        blocks = (len(part) + 3) // 4
        copy_bytes(data[chunk * chunk_bytes :][:chunk_bytes], words.view(np.uint8))
        read_blocks(words, np.uint64(block_bits), blocks, headers, bottoms, tops)
        join(headers, bottoms, tops, blocks, floats)
        put_floats(floats, add, part)


@kernel
def load(values: NDArray[Any], floats: Floats) -> None:
    """Load values as float32; the last block is padded as by zfp: a -> aaaa, ab -> abba, abc -> abca."""
    n = len(values)
    put_floats(values, False, floats[:n])
    if n % 4:
        block = floats[n // 4 * 4 :]
        if n % 4 == 1:
            block[1] = block[0]
        if n % 4 < 3:
            block[2] = block[1]
        block[3] = block[0]


@kernel
def split(floats: Floats, blocks: int, headers: Fields, bottoms: Longs, tops: Longs) -> None:
    """Compute headers and planes. A block that is all zeros, or not finite, has no planes."""
    for b in range(blocks):
        x, y, z, w = floats[4 * b], floats[4 * b + 1], floats[4 * b + 2], floats[4 * b + 3]
        peak = max(magnitude(x), magnitude(y), magnitude(z), magnitude(w))
        usable = peak >= LEAST and peak < INFINITY
        field = np.uint32(peak >> np.uint32(23))
        headers[b] = np.uint32(2 * field + 3) if usable else NOT_FINITE if peak >= INFINITY else np.uint32(0)
        scale = float_of(np.uint32(283 - field) << np.uint32(23))  # 2^30 over the power of two above the peak
        i, j, k, m = lift(
            fixed(x, scale, usable), fixed(y, scale, usable), fixed(z, scale, usable), fixed(w, scale, usable)
        )
        i, j, k, m = negabinary(i), negabinary(j), negabinary(k), negabinary(m)
        bottoms[b] = spread(i) | spread(j) << np.uint64(1) | spread(k) << np.uint64(2) | spread(m) << np.uint64(3)
        i, j, k, m = i >> np.uint32(16), j >> np.uint32(16), k >> np.uint32(16), m >> np.uint32(16)
        tops[b] = spread(i) | spread(j) << np.uint64(1) | spread(k) << np.uint64(2) | spread(m) << np.uint64(3)


@kernel
def join(headers: Fields, bottoms: Longs, tops: Longs, blocks: int, floats: Floats) -> None:
    for b in range(blocks):
        scale, bottom, top = scale_of(headers[b]), bottoms[b], tops[b]
        i, j, k, m = unlift(
            collect(bottom, top, 0), collect(bottom, top, 1), collect(bottom, top, 2), collect(bottom, top, 3)
        )
        floats[4 * b], floats[4 * b + 1] = np.float32(i) * scale, np.float32(j) * scale
        floats[4 * b + 2], floats[4 * b + 3] = np.float32(k) * scale, np.float32(m) * scale


@kernel
def write_blocks(headers: Fields, bottoms: Longs, tops: Longs, blocks: int, block_bits: Any, words: Longs) -> None:
    words[:] = 0
    at = np.uint64(0)
    for b in range(blocks):
        low, high = encode_planes(bottoms[b], tops[b], block_bits - HEADER_BITS)
        low, high = shift_left(low, high, HEADER_BITS)
        low |= np.uint64(headers[b])
        word, bit = at >> np.uint64(6), at & np.uint64(63)
        words[word] |= low << bit
        words[word + np.uint64(1)] |= high << bit | low >> np.uint64(1) >> (np.uint64(63) - bit)
        words[word + np.uint64(2)] |= high >> np.uint64(1) >> (np.uint64(63) - bit)
        at += block_bits


@kernel
def read_blocks(words: Longs, block_bits: Any, blocks: int, headers: Fields, bottoms: Longs, tops: Longs) -> None:
    at = np.uint64(0)
    for b in range(blocks):
        word, bit = at >> np.uint64(6), at & np.uint64(63)
        low = words[word] >> bit | words[word + np.uint64(1)] << np.uint64(1) << (np.uint64(63) - bit)
        high = words[word + np.uint64(1)] >> bit | words[word + np.uint64(2)] << np.uint64(1) << (np.uint64(63) - bit)
        low, high = cut(low, high, block_bits)
        headers[b] = low & np.uint64(511) if low & np.uint64(1) else np.uint64(0)
        low, high = shift_right(low, high, HEADER_BITS)
        bottoms[b], tops[b] = decode_planes(low, high, block_bits - HEADER_BITS)
        if not headers[b]:
            bottoms[b], tops[b] = 0, 0
        at += block_bits


@kernel
def magnitude(value: Any) -> Any:
    return np.uint32(bits_of(value) & MAGNITUDE)


@kernel
def fixed(value: Any, scale: Any, usable: Any) -> Any:
    """Round value * scale towards zero."""
    return np.int32((value if usable else np.float32(0)) * scale)


@kernel
def lift(x: Any, y: Any, z: Any, w: Any) -> Any:
    """Compute 1/16 of (4 4 4 4 / 5 1 -1 -5 / -4 4 4 -4 / -2 6 -6 2) times the block, but for the bits that >> loses."""
    x = np.int32(x + w) >> np.int32(1)
    w = np.int32(w - x)
    z = np.int32(z + y) >> np.int32(1)
    y = np.int32(y - z)
    x = np.int32(x + z) >> np.int32(1)
    z = np.int32(z - x)
    w = np.int32(w + y) >> np.int32(1)
    y = np.int32(y - w)
    w = np.int32(w + np.int32(y >> np.int32(1)))
    y = np.int32(y - np.int32(w >> np.int32(1)))
    return np.int32(x), np.int32(y), np.int32(z), np.int32(w)


@kernel
def unlift(x: Any, y: Any, z: Any, w: Any) -> Any:
    """Invert lift modulo 2^32, as hostile bits may overflow."""
    y = np.int32(y + np.int32(w >> np.int32(1)))
    w = np.int32(w - np.int32(y >> np.int32(1)))
    y = np.int32(y + w)
    w = np.int32(2 * w - y)
    z = np.int32(z + x)
    x = np.int32(2 * x - z)
    y = np.int32(y + z)
    z = np.int32(2 * z - y)
    w = np.int32(w + x)
    x = np.int32(2 * x - w)
    return x, y, z, w


@kernel
def negabinary(value: Any) -> Any:
    """Convert to base -2: small numbers of either sign have zeros on top."""
    return np.uint32(np.uint32(np.uint32(value) + NEGABINARY) ^ NEGABINARY)


@kernel
def spread(value: Any) -> Any:
    """Move bit i of 16 to bit 4 i of 64."""
    x = np.uint64(value) & np.uint64(0xFFFF)
    x = (x | x << np.uint64(24)) & np.uint64(0x000000FF000000FF)
    x = (x | x << np.uint64(12)) & np.uint64(0x000F000F000F000F)
    x = (x | x << np.uint64(6)) & np.uint64(0x0303030303030303)
    return (x | x << np.uint64(3)) & np.uint64(0x1111111111111111)


@kernel
def gather(x: Any) -> Any:
    """Move bit 4 i of 64 to bit i of 16."""
    x &= np.uint64(0x1111111111111111)
    x = (x | x >> np.uint64(3)) & np.uint64(0x0303030303030303)
    x = (x | x >> np.uint64(6)) & np.uint64(0x000F000F000F000F)
    x = (x | x >> np.uint64(12)) & np.uint64(0x000000FF000000FF)
    return np.uint32((x | x >> np.uint64(24)) & np.uint64(0xFFFF))


@kernel
def collect(bottom: Any, top: Any, place: int) -> Any:
    """Return a coefficient: every fourth bit from `place` on, out of negabinary."""
    by = np.uint64(place)
    digits = np.uint32(gather(bottom >> by) | gather(top >> by) << np.uint32(16))
    return np.int32(np.uint32(np.uint32(digits ^ NEGABINARY) - NEGABINARY))


@kernel
def scale_of(header: Any) -> Any:
    """Return 2^(exponent - 30), below the normal numbers too; NaN for a block that was not finite."""
    field = np.int32(header >> np.uint32(1))
    bits = np.int32(field - 30) << np.int32(23)
    if field <= 30:
        bits = np.int32(1) << np.int32(field - 8) if field >= 8 else np.int32(0)
    if header == NOT_FINITE:
        bits = np.int32(0x7FC00000)
    return float_of(np.uint32(bits))
