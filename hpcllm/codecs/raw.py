"""`raw`: the bytes of the values themselves. Encoding copies nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Raw:
    name: str = "raw"
    lossless: bool = True

    def encoded_bytes(self, n: int) -> int:
        return 4 * n

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 -- nothing to write
        return values.view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        if data.data_ptr() != out.data_ptr():  # a receive may have landed in `out` already
            out.copy_(data.view(torch.float32))

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(data.view(torch.float32))


RAW = Raw()
