"""Codecs of blocks: a code for each value, one float32 scale for each block of them.

    values    [ block 0: B values ][ block 1 ][ last block: 1 to B values ]
    bytes     [ codes of all values, 8 or 4 bits each ][0][ a scale a block ][0 0 ..]
                                                        |                    `- to a multiple of 16 bytes
                                                        `- to a multiple of 4 bytes

    scale = max(absmax / steps, 2^-126)        code ~ value / scale        decoded = code * scale, rounded once

steps is the float32 above the largest code: then no scale is rounded up so far that its product with the largest code
is above absmax, which could be infinite. absmax is taken on the bits, where Inf and NaN are the largest: a block with
one of them has scale NaN and decodes to NaN as a whole. The least scale is the least normal number, so that 1 / scale
is finite; blocks of tiny values keep an absolute error of half of it, and a block of zeros needs no rule of its own.

Padding is zero, so equal values give equal bytes. Any bytes of the right length decode to something: a code that no
encoder writes (-128 of int8), a scale that is infinite or below zero, stand for their product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.kernels import array_of, bits_of, float_of, kernel, run_in_threads, widened
from hpcllm.errors import CodecError

Doubles = NDArray[np.float64]
Values = NDArray[Any]  # an array_of: float32, or the bits of bf16 or fp16
LEAST_SCALE = np.float32(2.0**-126)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
WORD = (1 << 64) - 1
VALUES_A_THREAD = 1 << 18  # 30 to 100 us of work, several times what it costs to hand it over


@dataclass(frozen=True)
class Format:
    """Format of codes. Kernels take (values, codes, scales, values in a block): whole blocks, but for the last."""

    code_bits: int
    largest: float  # code
    error: Callable[[Doubles], Doubles]  # |value| / scale -> largest error of its code in exact arithmetic
    encode: Callable[..., None]  # if stochastic: and True, the key, the index of the first value in the whole array
    decode: Callable[..., None]  # and: add to the values?
    stochastic: bool = False


@dataclass(frozen=True)
class BlockLayout:
    """Layout of an encoding in blocks, on the CPU and on devices.

    key: with a value's place in the whole array it chooses the random number of a stochastic rounding.
    """

    name: str
    dtype: torch.dtype
    block: int
    format: Format
    key: int = 0
    lossless: bool = False
    fixed_rate: bool = True

    def encoded_bytes(self, n: int) -> int:
        return _round_up(self.scales_at(n) + 4 * _ceil_div(n, self.block), 16)

    def used_bytes(self, data: torch.Tensor, n: int) -> int:  # noqa: ARG002 -- the same for all bytes
        return self.encoded_bytes(n)

    def bound(self, values: Doubles) -> Doubles:
        """Return the bound with the rounding to dtype; infinite where a value of the block is not finite."""
        if not values.size:
            return np.zeros(0)
        peaks = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, self.block))  # NaN, if there is one
        peak = np.where(np.isfinite(peaks), peaks, np.inf).repeat(self.block)[: values.size]
        scale = np.maximum(peak / self.format.largest, LEAST_SCALE)
        with np.errstate(invalid="ignore"):
            error = scale * self.format.error(np.abs(values) / scale)
        info = torch.finfo(self.dtype)
        roundings = peak * (2.0**-21 + info.eps / 2) + info.smallest_normal * info.eps
        return np.where(np.isfinite(peak), error + roundings, np.inf)

    def scales_at(self, n: int) -> int:
        """Return the offset of the scales of n values, behind the codes."""
        return _round_up(self.code_bytes(n), 4)

    def code_bytes(self, n: int) -> int:
        return _ceil_div(n * self.format.code_bits, 8)

    def check_size(self, data: torch.Tensor, n: int) -> None:
        """Raise CodecError unless `data` is as long as the encoding of n values."""
        if data.numel() != self.encoded_bytes(n):
            raise CodecError(f"{self.name}: {data.numel()} bytes for {n} values, which take {self.encoded_bytes(n)}")


class BlockCodec(BlockLayout):
    """Codec of blocks for arrays on the CPU."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        n = values.numel()
        data = out[: self.encoded_bytes(n)]
        array, codes, scales = array_of(values), *self._parts(data.numpy(), n)

        def job(start: int, end: int, code: slice, block: slice) -> None:
            random = (True, np.uint64(self.key & WORD), np.uint64(index + start)) if self.format.stochastic else ()
            self.format.encode(array[start:end], codes[code], scales[block], self.block, *random)

        self._run(job, n)
        _zero_gaps(data.numpy(), codes, scales)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=False)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, add=True)

    def _decode(self, data: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        n = out.numel()
        self.check_size(data, n)
        array, codes, scales = array_of(out), *self._parts(data.numpy(), n)

        def job(start: int, end: int, code: slice, block: slice) -> None:
            self.format.decode(array[start:end], codes[code], scales[block], self.block, add)

        self._run(job, n)

    def _parts(self, data: NDArray[np.uint8], n: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        scales = data[self.scales_at(n) :][: 4 * _ceil_div(n, self.block)]
        return data[: self.code_bytes(n)], scales.view(np.float32)

    def _run(self, job: Callable[[int, int, slice, slice], None], n: int) -> None:
        """Run job(start, end, codes, blocks) over parts of n values that begin with a block, one for each thread."""

        def run(first: int, last: int) -> None:
            start, end = first * self.block, min(last * self.block, n)
            job(start, end, slice(self.code_bytes(start), self.code_bytes(end)), slice(first, last))

        run_in_threads(run, _ceil_div(n, self.block), VALUES_A_THREAD // self.block)


def steps_of(largest_code: float) -> np.float32:
    return np.float32(np.nextafter(np.float32(largest_code), np.float32(np.inf)))


@kernel
def block_scale(values: Values, steps: np.float32) -> np.float32:
    """Return the scale of a block; NaN if one of its values is not finite."""
    peak = np.uint32(0)
    for i in range(values.size):
        peak = max(peak, np.uint32(bits_of(widened(values[i])) & MAGNITUDE))
    if peak >= INFINITY:
        return np.float32(np.nan)
    scale: np.float32 = max(np.float32(float_of(peak) / steps), LEAST_SCALE)
    return scale


def _zero_gaps(data: NDArray[np.uint8], codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    scales_at = _round_up(codes.size, 4)
    data[codes.size : scales_at] = 0
    data[scales_at + scales.nbytes :] = 0


def _ceil_div(n: int, step: int) -> int:
    return -(-n // step)


def _round_up(n: int, step: int) -> int:
    return _ceil_div(n, step) * step
