"""Instructions that a group of 32 lanes issues for a value, by kernel: counted on the CPU that emulates it.

    x86 instructions of the kernel, an address as often as the lane that needs it most
    x 32 lanes / values of the groups                                                    = instructions a value

A model of an H100: instructions of x86 stand for those of the device, one for one. Its 132 multiprocessors issue 128
instructions of lanes a cycle at 1.755 GHz, 29.7e12 a second; a copy moves 3.0e12 bytes a second. A codec that moves B
bytes a value with I instructions reaches at most 9.9 B / I of a copy: zfp:8 of fp32, 5 bytes, 102 instructions: 0.49.
Integer arithmetic has half the lanes, and spills of x86's 16 registers are not a device's: an order of magnitude, and a
way to see that a kernel became slower.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from emulated import Emulator

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import device_codec
from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LANES

OPTIONS = ("-O2", "-march=x86-64-v3", "-fno-tree-vectorize", "-DCOUNTED")


class Counter(Emulator):
    """An Emulator that keeps the instructions of each kernel."""

    issued: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(32, OPTIONS)
        object.__setattr__(self, "issued", {})

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        counter = ctypes.c_uint64.in_dll(self.library(program), "issued")
        before = counter.value
        super().launch(program, kernel, groups, arguments)
        self.issued[kernel] = self.issued.get(kernel, 0) + counter.value - before


def why_not_counted() -> str:
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else ()
    return "" if "avx2" in flags else "instructions are counted by x86-64 processors with AVX2"


def instructions(name: str, dtype: torch.dtype, n: int) -> tuple[dict[str, float], int]:
    """({kernel: instructions a value}, bytes of the encoding) of n normally distributed values."""
    counter = Counter()
    codec = device_codec(find_codec(name, dtype), counter, "", "emulated")
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(n), dtype=torch.uint8))
    codec.decode(data, torch.empty_like(values))
    if hasattr(codec, "sum_encode"):
        rows = torch.stack([data, data, data, data])
        codec.sum_encode(rows, 1, values, torch.empty_like(data))
    return {kernel: issued * LANES / n for kernel, issued in counter.issued.items()}, len(data)
