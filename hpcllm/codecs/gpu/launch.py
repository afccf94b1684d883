"""Kernels on a device: started by CuPy on torch's current stream and in torch's memory.

    a program  --compiler.py-->  machine code, a file of this node  --RawModule, once a process and device-->  kernel
    tensors  --addresses-->  arguments, 64 bits each  --grid of groups-->  stream: nothing waits, nothing is copied

torch and CuPy share the device's context, so that an address of one is an address of the other, and the current stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from hpcllm.codecs.gpu.compiler import Program, binary_of, check_compiler, cuda_target
from hpcllm.errors import CodecError, HpcllmError

log = logging.getLogger(__name__)

LANES, THREADS = 32, 128  # of a group, and of a block of the launch, as common.cuh says
WORD = (1 << 64) - 1
VALUE_NAMES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}  # in common.cuh


class Launcher(Protocol):
    """Interface that starts kernels on one kind of device."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        """Queue a kernel with that many groups on the current stream of the device on which the tensors are.

        A tensor is handed over as its address, a number as 64 bits. No tensor has to be kept until the kernel has run:
        torch gives its memory to what is queued later on the same stream.
        """


class CupyLauncher:
    """Launcher for devices of CUDA and ROCm, both of which torch calls "cuda". Raises HpcllmError, ImportError."""

    def __init__(self) -> None:
        self.cupy = import_module("cupy")  # here: takes a second, and most runs have no device
        self.compiler = import_module("cupy.cuda").nvrtc  # hipRTC where CuPy was made for ROCm
        check_compiler(self.compiler)
        self.kernel = cache(self._kernel)

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        if not groups:
            return
        check_aligned(program, arguments)
        device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
        words = tuple(np.uint64(_word(argument)) for argument in arguments)
        with self.cupy.cuda.Device(device.index), self._stream(device):
            self.kernel(program, kernel, device.index)((blocks_of(groups),), (THREADS,), words)

    def _stream(self, device: torch.device) -> Any:
        return cupy_stream(self.cupy, torch.cuda.current_stream(device).cuda_stream)

    def _kernel(self, program: Program, kernel: str, index: int) -> Any:
        device = torch.cuda.get_device_properties(index)
        target = device.gcnArchName if torch.version.hip else cuda_target(device.major, device.minor, self.compiler)
        return self.cupy.RawModule(path=binary_of(program, target, self.compiler)).get_function(kernel)


@dataclass(frozen=True)
class ForeignStream:
    """Stream by its address, as CuPy 14 takes one; torch's own have the method only in newer versions."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address  # version of the protocol


def cupy_stream(cupy: Any, address: int) -> Any:
    """Return CuPy's object for a stream of torch's. Without a warning: what CuPy had before 14 is deprecated there."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(ForeignStream(address))
    return cupy.cuda.ExternalStream(address)


def rows_of(parts: torch.Tensor, own_rank: int, row_bytes: int) -> tuple[torch.Tensor, int, int, int]:
    """Return the first arguments of a kernel that sums the encodings in the rows of `parts`. Raises CodecError."""
    ranks, length = parts.shape
    apart_bytes, ragged = parts.stride(0), row_bytes and (parts.stride(1) != 1 or parts.stride(0) % 4)
    if ragged or length < row_bytes or not 0 <= own_rank < ranks:
        raise CodecError(
            f"rank {own_rank} of {ranks}: rows of {length} bytes, {apart_bytes} apart, for encodings of {row_bytes}"
        )
    return parts, apart_bytes, ranks, own_rank


def blocks_of(groups: int) -> int:
    """Number of blocks of the launch for that many groups; groups past the last return at once."""
    return -(-groups * LANES // THREADS)


def check_aligned(program: Program, arguments: Sequence[torch.Tensor | int]) -> None:
    """Raise CodecError for an encoding that does not start at a multiple of 4 bytes, where kernels read it by words."""
    for argument in arguments if program.source != "casts" else ():  # which reads value by value
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.uint8 and argument.data_ptr() % 4:
            raise CodecError(f"an encoding at address {argument.data_ptr():#x}, which is no multiple of 4 bytes")


def _word(argument: torch.Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument & WORD


def _cupy_launcher() -> Launcher:
    if not find_spec("cupy"):
        raise HpcllmError("CuPy is not installed: pip install cupy-cuda13x, or see README for ROCm")
    try:
        return CupyLauncher()
    except ImportError as error:
        raise HpcllmError(f"CuPy is for another CUDA or ROCm than this machine's: {error}") from error


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"cuda": _cupy_launcher}


@cache
def launcher_of(device_type: str) -> tuple[Launcher | None, str]:
    """Return the launcher for devices of a type of torch's; where no kernel can be compiled for them, None and why."""
    find = LAUNCHERS.get(device_type)
    if find is None:
        return None, f"kernels are for devices of {', '.join(LAUNCHERS)}"
    try:
        return find(), ""
    except HpcllmError as error:
        log.info("no kernels for %s: %s", device_type, error)
        return None, str(error)
