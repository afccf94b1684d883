"""`raw`, `bf16` and `fp16`: the bytes of the values themselves, or of the values rounded to nearest, ties to even.

The relative error of bf16 is at most 2^-8 of the value, that of fp16 2^-11. NaN stays NaN, infinities stay. What is
above the largest value becomes infinite, as IEEE rounding does: at 65520 in fp16, whose smallest value is 2^-24, so
that it suits values of known size only. Encoding by `raw` copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.errors import CodecError


@dataclass(frozen=True)
class Cast:
    """Codec that sends values as `wire`, a dtype of torch."""

    name: str
    dtype: torch.dtype
    wire: torch.dtype
    fixed_rate: bool = True
    block: int = 1

    @property
    def lossless(self) -> bool:
        return self.wire == self.dtype

    def encoded_bytes(self, n: int) -> int:
        return n * self.wire.itemsize

    def used_bytes(self, data: torch.Tensor, n: int) -> int:  # noqa: ARG002 -- the same for all bytes
        return self.encoded_bytes(n)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        data = out[: self.encoded_bytes(values.numel())]
        data.view(self.wire).copy_(values)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._values(data, out))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(self._values(data, out))  # 16 bit -> fp32 is exact, so the sum is an fp32 sum

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.lossless:
            return np.zeros_like(values)
        info = torch.finfo(self.wire)
        bounds = np.maximum(np.abs(values) * info.eps / 2, info.smallest_normal * info.eps / 2)
        largest = min(info.max, torch.finfo(self.dtype).max)  # 65504 of fp16 comes back from bf16 as 65536: infinite
        return np.where(np.abs(values) + bounds > largest, np.inf, bounds)

    def _values(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if data.numel() != self.encoded_bytes(out.numel()):
            raise CodecError(f"{self.name}: {data.numel()} bytes for {out.numel()} values of {self.wire.itemsize}")
        return data.view(self.wire)


class Raw(Cast):
    """Codec whose encoding is the memory of the values; wire is dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__("raw", dtype, dtype)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        return values.view(torch.uint8) if values.numel() else out[:0]  # an empty array may have any stride

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        if data.data_ptr() != out.data_ptr():  # a receive may have landed in `out` already
            super().decode(data, out)
