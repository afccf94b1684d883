"""Kernels on a device: started by CuPy on torch's current stream and in torch's memory.

    a program  --compiler.py-->  machine code, a file of this node  --RawModule, once a process and device-->  kernel
    tensors  --addresses-->  arguments, 64 bits each  --grid of groups-->  stream: nothing waits, nothing is copied

torch and CuPy share the device's context, so that an address of one is an address of the other, and the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from hpcllm.codecs.gpu.compiler import Program, binary_of, check_compiler, target_of
from hpcllm.errors import CodecError, HpcllmError

LANES, THREADS = 32, 128  # of a group, and of a block of the launch, as common.cuh says
WORD = (1 << 64) - 1
VALUE_NAMES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}  # in common.cuh
TRIED = Program("casts", ("VALUE=Fp32", "WIRE=Fp32"))  # at the start: sums of gradients that travel raw
PACKAGES = {"cuda12": "cupy-cuda12x", "cuda13": "cupy-cuda13x", "rocm7": "cupy-rocm-7-0"}  # of CuPy, by PyTorch's build


class Launcher(Protocol):
    """Interface that starts kernels on one kind of device."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        """Queue a kernel with that many groups on the current stream of the device on which the tensors are.

        A tensor is handed over as its address, a number as 64 bits. No tensor has to be kept until the kernel has run:
        torch gives its memory to what is queued later on the same stream.
        """


class CupyLauncher:
    """Launcher for devices of CUDA and ROCm, both of which torch calls "cuda".

    Made once a kernel has been compiled for this process's device and loaded. Raises HpcllmError with the fix.
    """

    def __init__(self) -> None:
        self.cupy, self.compiler = find_cupy()
        self.kernel = cache(self._kernel)
        self._try_one(torch.cuda.current_device())

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

    def _try_one(self, index: int) -> None:
        """Compile a kernel that every run has and load it: what cannot be is known before the first step."""
        try:
            with self.cupy.cuda.Device(index):
                self.kernel(TRIED, "sum_encode", index)
        except HpcllmError:
            raise
        except Exception as error:  # of the driver's or the runtime's, by CuPy
            raise HpcllmError(
                f"the driver does not take what CuPy's compiler has made ({error}); {how_to_install()}"
            ) from error

    def _kernel(self, program: Program, kernel: str, index: int) -> Any:
        target = target_of(torch.cuda.get_device_properties(index), self.compiler)
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


def find_cupy() -> tuple[Any, Any]:
    """Return CuPy and its module for the compiler, hipRTC or NVRTC, which is there and new enough; needs no device.

    Raises HpcllmError with what to install.
    """
    if not find_spec("cupy"):
        raise HpcllmError(f"CuPy is not installed; {how_to_install()}")
    try:
        cupy = import_module("cupy")  # here: takes a second, and most runs have no device
        compiler = import_module("cupy.cuda").nvrtc  # hipRTC where CuPy was made for ROCm
    except ImportError as error:
        raise HpcllmError(
            f"CuPy is for another CUDA or ROCm than this machine's ({error}); {how_to_install()}"
        ) from error
    if bool(torch.version.hip) != bool(cupy.cuda.runtime.is_hip):
        raise HpcllmError(f"CuPy and PyTorch are for devices of different vendors; {how_to_install()}")
    if len(runtimes := hip_runtimes()) > 1:
        raise HpcllmError(f"CuPy and PyTorch have loaded a HIP runtime each, {' and '.join(runtimes)}: one has to do")
    check_compiler(compiler)
    return cupy, compiler


def why_no_cupy() -> str:
    """Return why CuPy cannot load kernels here, with what to install, "" if it may; needs no device."""
    try:
        find_cupy()
    except HpcllmError as error:
        return str(error)
    return ""


def how_to_install() -> str:
    """Return the words that name CuPy's package for this PyTorch."""
    kind, version = ("ROCm", torch.version.hip) if torch.version.hip else ("CUDA", torch.version.cuda or "")
    if (build := kind.lower() + version.partition(".")[0]) in PACKAGES:
        return f"pip install {PACKAGES[build]}"
    built_for = f"{kind} {version}" if version else "CPUs"
    return f"CuPy has no package for a PyTorch for {built_for}: take one for ROCm 7, CUDA 12 or CUDA 13"


def hip_runtimes() -> list[str]:
    """Return the paths of HIP runtimes in this process; a stream of one is none of the other's. [] without ROCm."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            return sorted({line[line.index("/") :].strip() for line in lines if "/libamdhip64" in line})
    except OSError:
        return []


LAUNCHERS: dict[str, Callable[[], Launcher]] = {"cuda": CupyLauncher}


def why_no_kernels(device_type: str) -> str:
    """Return why kernels cannot be loaded for devices of a type, with what to install; "" if they can; "" for "cpu"."""
    return "" if device_type == "cpu" else launcher_of(device_type)[1]


@cache
def launcher_of(device_type: str) -> tuple[Launcher | None, str]:
    """Return the launcher for devices of a type of torch's; where no kernel can be compiled for them, None and why."""
    find = LAUNCHERS.get(device_type)
    if find is None:
        return None, f"kernels are for devices of {', '.join(LAUNCHERS)}"
    try:
        return find(), ""
    except HpcllmError as error:
        return None, str(error)
