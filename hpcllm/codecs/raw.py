"""`raw`: the bytes of the values themselves. Encoding copies nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.errors import CodecError


@dataclass(frozen=True)
class Raw:
    dtype: torch.dtype = torch.float32
    name: str = "raw"
    lossless: bool = True
    fixed_rate: bool = True
    block: int = 1

    def encoded_bytes(self, n: int) -> int:
        return n * self.dtype.itemsize

    def used_bytes(self, data: torch.Tensor, n: int) -> int:  # noqa: ARG002 -- the same for all bytes
        return self.encoded_bytes(n)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        return values.view(torch.uint8) if values.numel() else out[:0]  # an empty array may have any stride

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        if data.data_ptr() != out.data_ptr():  # a receive may have landed in `out` already
            out.copy_(self._values(data, out))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(self._values(data, out))  # 16 bit -> fp32 is exact, so the sum is an fp32 sum

    def bound(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(values)

    def _values(self, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if data.numel() != self.encoded_bytes(out.numel()):
            raise CodecError(f"raw: {data.numel()} bytes for {out.numel()} values of {self.dtype.itemsize}")
        return data.view(self.dtype)
