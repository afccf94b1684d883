"""`bf16` and `fp16`: the value rounded to nearest, ties to even. Relative error at most 2^-8 or 2^-11 of the value.

NaN stays NaN, infinities stay. What is above the largest value becomes infinite, as IEEE rounding does: at 65520 in
fp16, whose smallest value is 2^-24, so that it suits values of known size only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.errors import CodecError


@dataclass(frozen=True)
class Cast:
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
