"""`zfp:rate` on a device: the bytes of codecs/zfp.py. Kernels: zfp.cu. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hpcllm.codecs.gpu.binaries import Program
from hpcllm.codecs.gpu.launch import LANES, VALUE_NAMES, Launcher
from hpcllm.codecs.zfp import ZfpLayout

GROUP_VALUES = 4 * LANES  # a block a lane


@dataclass(frozen=True)
class ZfpKernels(ZfpLayout):
    """launcher: for the device on which all tensors are."""

    launcher: Launcher = field(kw_only=True)

    @property
    def program(self) -> Program:
        return Program("zfp", (f"VALUE={VALUE_NAMES[self.dtype]}", f"RATE={self.rate}"))

    def encode(self, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> torch.Tensor:  # noqa: ARG002
        data = out[: self.encoded_bytes(values.numel())]
        self._launch("encode", values, data)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._launch("decode" if out.dtype == self.dtype else "decode_floats", out, data)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.check_length(data, out)
        self._launch("decode_add", out, data)

    def _launch(self, kernel: str, values: torch.Tensor, data: torch.Tensor) -> None:
        n, words = values.numel(), data.numel() // 4
        groups = -(-n // GROUP_VALUES)
        self.launcher.launch(self.program, kernel, groups, [values, n, data, words, groups])
