"""int8, int4 and fp8 on a device: the layout of codecs/blocks.py, with the kernels of quantise.cu.

    n values  --one group of 32 lanes for each block, or for 128 values-->  codes, scales        one pass over memory

Sums of encodings are encoded again by one kernel: the addends of all ranks are read once, and nothing in fp32 is
written on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hpcllm.codecs.blocks import BlockLayout
from hpcllm.codecs.gpu.binaries import Program
from hpcllm.codecs.gpu.launch import VALUE_NAMES, Launcher, rows_of

STEP = 128  # values that a group takes at once, as common.cuh says


@dataclass(frozen=True)
class BlockKernels(BlockLayout):
    """code: the struct of quantise.cu; launcher: for the device on which all tensors are. Nothing is waited for."""

    code: str = field(kw_only=True)
    launcher: Launcher = field(kw_only=True)

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:
        n = values.numel()
        data = out[: self.encoded_bytes(n)]
        self._launch("encode", values.dtype, n, [values, data, *self._encoding(n, index)])
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode("decode", data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self._decode("decode_add", data, out)

    def sum_encode(
        self, parts: torch.Tensor, own_rank: int, own: torch.Tensor, out: torch.Tensor, index: int = 0
    ) -> torch.Tensor:
        """See protocol.SumEncoder."""
        n = own.numel()
        data = out[: self.encoded_bytes(n)]
        rows = rows_of(parts, own_rank, self.encoded_bytes(n))
        self._launch("sum_encode", own.dtype, n, [*rows, own, data, *self._encoding(n, index)])
        return data

    def _encoding(self, n: int, index: int) -> tuple[int, ...]:
        return n, self.scales_at(n), self.encoded_bytes(n), self.key, index

    def _decode(self, kernel: str, data: torch.Tensor, out: torch.Tensor) -> None:
        n = out.numel()
        self.check_size(data, n)
        self._launch(kernel, out.dtype, n, [data, out, n, self.scales_at(n)])

    def _launch(self, kernel: str, dtype: torch.dtype, n: int, arguments: Sequence[torch.Tensor | int]) -> None:
        groups = -(-n // max(self.block, STEP))
        self.launcher.launch(self._program(dtype), kernel, groups, [*arguments, groups])

    @property
    def program(self) -> Program:
        """Its kernels for arrays of its own dtype; decoding to fp32 takes those for fp32."""
        return self._program(self.dtype)

    def _program(self, dtype: torch.dtype) -> Program:
        code = f"CODE={self.code}", f"BLOCK={self.block}", f"STOCHASTIC={int(self.format.stochastic)}"
        return Program("quantise", (f"VALUE={VALUE_NAMES[dtype]}", *code))
