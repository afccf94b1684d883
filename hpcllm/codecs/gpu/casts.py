"""raw, bf16 and fp16 on a device: torch converts in one pass, a kernel adds up what ranks sent.

R rows  --torch-->  R launches, R - 1 of which read and write an fp32 sum
R rows  --casts.cu-->  one launch, in which each row is read once
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpcllm.codecs.cast import Cast
from hpcllm.codecs.gpu.binaries import Program
from hpcllm.codecs.gpu.launch import VALUE_NAMES, Launcher, rows_of
from hpcllm.codecs.raw import Raw

GROUP_VALUES = 256  # of a group, as casts.cu says


@dataclass(frozen=True)
class CastKernels(Cast):
    """launcher: for the device on which all tensors are."""

    launcher: Launcher = field(kw_only=True)

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0  # noqa: ARG002
    ) -> torch.Tensor:  # fmt: skip
        """See protocol.SumEncoder."""
        data = out[: self.encoded_bytes(own.numel())]
        _sum(self.launcher, parts, own_rank, own, data, self.wire)
        return data


@dataclass(frozen=True)
class RawKernels(Raw):
    """launcher: for the device on which all tensors are."""

    launcher: Launcher = field(kw_only=True)

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0  # noqa: ARG002
    ) -> torch.Tensor:  # fmt: skip
        """See protocol.SumEncoder. The encoding is the memory of `own`."""
        if not own.numel():
            return out[:0]
        _sum(self.launcher, parts, own_rank, own, own.view(torch.uint8), self.dtype)
        return own.view(torch.uint8)


def sum_program(dtype: torch.dtype, wire: torch.dtype) -> Program:
    return Program("casts", (f"VALUE={VALUE_NAMES[dtype]}", f"WIRE={VALUE_NAMES[wire]}"))


def _sum(
    launcher: Launcher, parts: torch.Tensor, own_rank: int, own: torch.Tensor, data: torch.Tensor, wire: torch.dtype
) -> None:
    n = own.numel()
    groups = -(-n // GROUP_VALUES)
    rows = rows_of(parts, own_rank, n * wire.itemsize)
    launcher.launch(sum_program(own.dtype, wire), "sum_encode", groups, [*rows, own, data, n, groups])
