"""How kernels on a device are compiled and started: CuPy, on torch's current stream and in torch's memory.

    common.cuh + quantise.cu + "VALUE=Bf16", ..  --NVRTC or hipRTC-->  machine code, a file of this node (binaries.py)
                                                                          |  RawModule, once a process and device
    tensors  --addresses-->  arguments, 64 bits each  --grid of groups-->  stream: nothing waits, nothing is copied

torch and CuPy share the device's context, so that an address of one is an address of the other, and the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from hpcllm.codecs.gpu.binaries import Program, binary_of
from hpcllm.errors import CodecError

LANES, THREADS = 32, 128  # of a group, and of a block of the launch, as common.cuh says
WORD = (1 << 64) - 1
VALUE_NAMES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}  # in common.cuh


class Launcher(Protocol):
    """Starts kernels on one kind of device."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        """Queue a kernel with that many groups on the current stream of the device on which the tensors are.

        A tensor is handed over as its address, a number as 64 bits. No tensor has to be kept until the kernel has run:
        torch gives its memory to what is queued later on the same stream.
        """
        ...


class CupyLauncher:
    """For devices of CUDA and ROCm, both of which torch calls "cuda"."""

    def __init__(self) -> None:
        self.cupy = import_module("cupy")  # here: takes a second, and most runs have no device
        self.compiler = import_module("cupy.cuda").nvrtc  # hipRTC where CuPy was made for ROCm
        self.kernel = cache(self._kernel)

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        if not groups:
            return
        device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
        words = tuple(np.uint64(_word(argument)) for argument in arguments)
        with self.cupy.cuda.Device(device.index), self._stream(device):
            self.kernel(program, kernel, device.index)((blocks_of(groups),), (THREADS,), words)

    def _stream(self, device: torch.device) -> Any:
        stream, cuda = torch.cuda.current_stream(device), self.cupy.cuda
        if hasattr(stream, "__cuda_stream__") and hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.cuda_stream)  # before CuPy 14

    def _kernel(self, program: Program, kernel: str, index: int) -> Any:
        properties = torch.cuda.get_device_properties(index)
        target = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        return self.cupy.RawModule(path=binary_of(program, target, self.compiler)).get_function(kernel)


def rows_of(parts: torch.Tensor, own_rank: int, row_bytes: int) -> tuple[torch.Tensor, int, int, int]:
    """The first arguments of a kernel that sums encodings, at the front of the rows of `parts`. Raises CodecError."""
    ranks, length = parts.shape
    apart_bytes, ragged = parts.stride(0), row_bytes and (parts.stride(1) != 1 or parts.stride(0) % 4)
    if ragged or length < row_bytes or not 0 <= own_rank < ranks:
        raise CodecError(
            f"rank {own_rank} of {ranks}: rows of {length} bytes, {apart_bytes} apart, for encodings of {row_bytes}"
        )
    return parts, apart_bytes, ranks, own_rank


def blocks_of(groups: int) -> int:
    """Blocks of the launch for that many groups: the groups that are too many return at once."""
    return -(-groups * LANES // THREADS)


def _word(argument: torch.Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument & WORD


def _cupy_launcher() -> Launcher | None:
    try:
        return CupyLauncher() if find_spec("cupy") else None
    except ImportError:  # for another CUDA or ROCm than this machine's: as if there were none
        return None


LAUNCHERS: dict[str, Callable[[], Launcher | None]] = {"cuda": _cupy_launcher}


@cache
def launcher_of(device_type: str) -> Launcher | None:
    """For devices of torch's type; None where no kernel can be compiled for them."""
    find = LAUNCHERS.get(device_type)
    return find() if find else None
