"""`zfp:rate`: blocks of four values in exactly 4 x rate bits, the 1-D fixed-rate stream of the zfp library, no header.

    x0 x1 x2 x3 --> common exponent e --> integers x 2^(30-e) --> lifted transform --> base -2 --> bit planes, cut off

    bits        0                     there is nothing but zeros in this block
                1 | e + 127 (8 bits) | planes from the highest, coded in zfp_planes.py, up to 4 x rate bits

Bit for bit what zfp 1.0 writes and reads for float32, in words of 64 bits; 16-bit values are widened first. Two rules
are our own, where the library's behaviour is undefined or destroys values:
- a block whose largest magnitude is below 2^-98 is written as zeros (the library's scale factor overflows there);
- a block with a NaN or an infinity decodes to four NaN: its header is 1 with exponent field 0, as no library writes it.

Planes are cut off, not rounded, so that the error has a bias. There is no gain over block integers on gradients, whose
neighbours are unrelated: this codec is here for what it is compatible with.
Source: Lindstrom 2014, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20, section 4; zfp 1.0's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.kernels import array_of
from hpcllm.codecs.threads import share_out
from hpcllm.codecs.zfp_blocks import CHUNK, decode_add_chunks, decode_chunks, encode_chunks
from hpcllm.errors import CodecError

CHUNKS_A_THREAD = 64
LEAST_PEAK = 2.0**-98
ROUNDING_UNITS = 80.0  # 16 for what the transforms shift out, 64 for 31 bits that become a float32


@dataclass(frozen=True)
class ZfpLayout:
    """rate: bits a value, 3 to 32."""

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
        """Relative to the block: 3.75 x 2^(5 - rate) x the power of two above its largest magnitude, from rate 7 on.

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
    """For arrays in memory."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        data = out[: self.encoded_bytes(values.numel())]
        self._share_out(lambda part, code: encode_chunks(part, 4 * self.rate, code), data, values)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._share_out(lambda part, code: decode_chunks(code, 4 * self.rate, part), data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._share_out(lambda part, code: decode_add_chunks(code, 4 * self.rate, part), data, out)

    def _share_out(self, job: Callable[..., None], data: torch.Tensor, values: torch.Tensor) -> None:
        """Run job(values, bytes) over parts of whole chunks, one for each thread."""
        array, code = array_of(values), data.numpy()
        chunk_bytes = CHUNK * self.rate // 8

        def run(first: int, last: int) -> None:
            job(array[first * CHUNK : last * CHUNK], code[first * chunk_bytes : last * chunk_bytes])

        share_out(run, -(-array.size // CHUNK), CHUNKS_A_THREAD)
