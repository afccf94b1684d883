"""`int8:B` by torch's own operations, for devices that kernels cannot be compiled for: the bits of codecs/quantise.py.

    values  --parts of some blocks-->  absmax, scale, codes        a dozen passes over memory that is used again

Exact, since each operation is one of IEEE's. Divisors are tensors: torch multiplies by the reciprocal of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hpcllm.codecs.blocks import INFINITY, LEAST_SCALE, MAGNITUDE, BlockLayout
from hpcllm.codecs.quantise import ROUND8, STEPS8

PART_VALUES = 1 << 22  # whose intermediate results are in memory at one time


@dataclass(frozen=True)
class TorchInt8(BlockLayout):
    """int8 with rounding to nearest; all tensors on one device, or on the CPU."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        n = values.numel()
        data = out[: self.encoded_bytes(n)]
        if not n:
            return data
        data[self.code_bytes(n) : self.scales_at(n)] = 0
        codes, scales = self._parts(data, n)
        data[self.scales_at(n) + scales.nbytes :] = 0
        for first, end, blocks in self._pieces(n):
            scales[blocks] = self._encode(values[first:end], codes[first:end])
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, torch.Tensor.copy_)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(data, out, torch.Tensor.add_)

    def _encode(self, values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Write the codes and return the scales."""
        blocks = self._rows(values.float())
        peaks = (blocks.view(torch.int32) & int(MAGNITUDE)).amax(1)
        least = torch.full_like(peaks, float(LEAST_SCALE), dtype=torch.float32)
        scales = torch.maximum(peaks.view(torch.float32) / torch.full_like(least, float(STEPS8)), least)
        finite = peaks < int(INFINITY)
        scales = torch.where(finite, scales, torch.nan)
        rounded = blocks * (torch.ones_like(scales) / scales)[:, None] + float(ROUND8)
        low_byte = rounded.view(torch.int32) & 0xFF
        codes.copy_(torch.where(finite[:, None], low_byte, 0).view(-1)[: values.numel()])
        return scales

    def _decode(
        self, data: torch.Tensor, out: torch.Tensor, put: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        n = out.numel()
        self.check_size(data, n)
        if not n:
            return
        codes, scales = self._parts(data, n)
        for first, end, blocks in self._pieces(n):
            values = self._rows(codes[first:end].view(torch.int8).float()) * scales[blocks, None]
            put(out[first:end], values.view(-1)[: end - first])

    def _pieces(self, n: int) -> Iterator[tuple[int, int, slice]]:
        """Yield (first value, end, their blocks) of parts that begin with a block."""
        for first in range(0, n, PART_VALUES):
            end = min(first + PART_VALUES, n)
            yield first, end, slice(first // self.block, -(-end // self.block))

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape (n,) to (blocks, values in a block), with zeros behind the end."""
        missing = -values.numel() % self.block
        return torch.nn.functional.pad(values, (0, missing)).view(-1, self.block)

    def _parts(self, data: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = data[self.scales_at(n) :][: 4 * -(-n // self.block)]
        return data[: self.code_bytes(n)], scales.view(torch.float32)
