"""Codecs: values <-> bytes on the wire. They never see a communicator.

    values (n,) float32  --encode-->  encoded_bytes(n) uint8  --decode-->  values (n,) float32

Fixed rate: n values always take encoded_bytes(n), so a receiver can post its receive before anything is sent.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hpcllm.codecs.cast import BF16
from hpcllm.codecs.raw import RAW


class Codec(Protocol):
    """What a collective asks of a codec; all tensors are contiguous, on one device."""

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def encoded_bytes(self, n: int) -> int:
        """Bytes that n values take."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """(n,) float32 -> its bytes: written to `out` (at least encoded_bytes(n) uint8), or `values`' own memory."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """(encoded_bytes(n),) uint8 -> out (n,) float32."""
        ...

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """out += the decoded values, in fp32."""
        ...


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, BF16)}

__all__ = ["BF16", "CODECS", "RAW", "Codec"]
