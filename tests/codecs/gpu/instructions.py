"""Instructions that a wave of 32 or 64 lanes issues for a value, by kernel: counted on the CPU that emulates it.

    x86 instructions of the kernel, an address as often as the lane that needs it most
    x 32 or 64 lanes / values of the waves                                               = instructions a value

A model of an H100: instructions of x86 stand for those of the device, one for one. Its 132 multiprocessors issue 128
instructions of lanes a cycle at 1.755 GHz, 29.7e12 a second; a copy moves 3.0e12 bytes a second. A codec that moves B
bytes a value with I instructions reaches at most 9.9 B / I of a copy: zfp:8 of fp32, 5 bytes, 102 instructions: 0.49.
Integer arithmetic has half the lanes, exp and log are not counted, and spills of x86's 16 registers are not a device's:
an order of magnitude, and a way to see that a kernel became slower.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from emulated import Emulator, on_the_cpu

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import device_codec
from hpcllm.codecs.gpu.compiler import Program
from hpcllm.model.gpu import fused

OPTIONS = ("-O2", "-march=x86-64-v3", "-fno-tree-vectorize", "-DCOUNTED")


class Counter(Emulator):
    """An Emulator that keeps the instructions of each kernel."""

    issued: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes, OPTIONS)
        object.__setattr__(self, "issued", {})

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        counter = ctypes.c_uint64.in_dll(self.library(program), "issued")
        before = counter.value
        super().launch(program, kernel, groups, arguments)
        self.issued[kernel] = self.issued.get(kernel, 0) + counter.value - before


def why_not_counted() -> str:
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else ()
    return "" if "avx2" in flags else "instructions are counted by x86-64 processors with AVX2"


def instructions(name: str, dtype: torch.dtype, n: int, lanes: int = 32) -> tuple[dict[str, float], int]:
    """({kernel: instructions a value}, bytes of the encoding) of n normally distributed values."""
    counter = Counter(lanes)
    codec = device_codec(find_codec(name, dtype), counter, "", "emulated")
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(n), dtype=torch.uint8))
    codec.decode(data, torch.empty_like(values))
    if hasattr(codec, "sum_encode"):
        rows = torch.stack([data, data, data, data])
        codec.sum_encode(rows, 1, values, torch.empty_like(data))
    return {kernel: issued * lanes / n for kernel, issued in counter.issued.items()}, len(data)


def model_instructions(name: str, dtype: torch.dtype, lanes: int = 32) -> dict[str, float]:
    """{kernel: instructions a value} of an operation of the model, forward and backward, for VALUES values."""
    counter = Counter(lanes)
    with on_the_cpu(counter):
        OPERATIONS[name](dtype)
    return {kernel: issued * lanes / VALUES for kernel, issued in counter.issued.items()}


VALUES, ROWS = 1024, 2


def _swiglu(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(VALUES).to(dtype).requires_grad_() for _ in range(2))
    fused.swiglu(gate, up).backward(torch.ones(VALUES, dtype=dtype))


def _rms_norm(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((ROWS, VALUES // ROWS), (VALUES // ROWS,)))
    fused.rms_norm(x, weight, 1e-5).backward(torch.ones_like(x))


def _rotary(dtype: torch.dtype) -> None:
    q, k = (torch.randn(1, 4, heads, 64).to(dtype).requires_grad_() for heads in (3, 1))
    fused.rotate(q, k, torch.randn(2, 4, 1, 64))


def _cross_entropy(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(1, VALUES).to(dtype), torch.tensor([7])
    normaliser, _ = fused.row_statistics(logits, targets, 0)
    fused.subtract_one_hot(logits, targets, 0, normaliser, torch.ones(1))


OPERATIONS = {"swiglu": _swiglu, "rms_norm": _rms_norm, "rotary": _rotary, "cross_entropy": _cross_entropy}
