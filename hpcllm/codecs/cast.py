"""`bf16`: the upper half of a float32, rounded to nearest, ties to even. Relative error at most 2^-8 of the value.

NaN stays NaN, infinities stay; values above the largest bf16 round to infinity, as IEEE rounding does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    name: str
    dtype: torch.dtype
    lossless: bool = False

    def encoded_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        data = out[: self.encoded_bytes(values.numel())]
        data.view(self.dtype).copy_(values)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(self.dtype))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(data.view(self.dtype))  # bf16 -> fp32 is exact, so the sum is an fp32 sum


BF16 = Cast("bf16", torch.bfloat16)
