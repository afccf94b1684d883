"""Kernels on a device: compiled once on a node, started by CuPy on torch's current stream and in torch's memory.

    common.cuh + quantise.cu + "VALUE=Bf16", ..  --NVRTC or hipRTC-->  machine code, a file of this node
                                                                          |  RawModule, once a process and device
    tensors  --addresses-->  arguments, 64 bits each  --grid of groups-->  stream: nothing waits, nothing is copied

torch and CuPy share the device's context, so that an address of one is an address of the other, and the current stream.
The name of the file is a hash of text, options, target and version of the compiler, neither of which needs a device.

CuPy has a cache of its own, but it compiles with denormals flushed to zero and takes no option against it (issue 9576
of cupy/cupy). The bits of an encoding must not depend on the device, so arithmetic has to be IEEE's: denormals are
kept, divisions rounded to nearest, a product and a sum not fused. The first two are defaults of both compilers, the
last of neither. Sources: NVIDIA, "NVRTC", supported compile options; LLVM, "Clang command line argument reference", and
review D101654 for division. The folder is that of codecs/kernels.py: only this user can write to it, and it is not in
a home folder, which thousands of ranks would read at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hpcllm.codecs.kernels import cache_folder
from hpcllm.errors import CodecError, HpcllmError

LANES, THREADS = 32, 128  # of a group, and of a block of the launch, as common.cuh says
WORD = (1 << 64) - 1
VALUE_NAMES = {torch.float32: "Fp32", torch.bfloat16: "Bf16", torch.float16: "Fp16"}  # in common.cuh
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
HIPRTC_OPTIONS = (
    "--std=c++17", "-ffp-contract=off", "-fno-gpu-flush-denormals-to-zero", "-fhip-fp32-correctly-rounded-divide-sqrt"
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Source text in this folder, with values of its macros: Program("quantise", ("VALUE=Fp32", "BLOCK=256"))."""

    source: str
    macros: tuple[str, ...]
    parts: tuple[str, ...] = ()  # texts that come after the source and use what it defines: "tiles.cuh"

    def text(self) -> str:
        """Return the whole text: common.cuh, the source, the parts; no #include."""
        names = ["common.cuh", f"{self.source}.cu", *self.parts]
        return "\n".join(f'#line 1 "{name}"\n{(Path(__file__).parent / name).read_text()}' for name in names)

    def defines(self) -> tuple[str, ...]:
        return tuple(f"-D{macro}" for macro in self.macros)


class Launcher(Protocol):
    """Interface that starts kernels on one kind of device."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        """Queue a kernel with that many groups on the current stream of the device on which the tensors are.

        A tensor is handed over as its address, a number as 64 bits. No tensor has to be kept until the kernel has run:
        torch gives its memory to what is queued later on the same stream.
        """


class CupyLauncher:
    """Launcher for devices of CUDA and ROCm, both of which torch calls "cuda"."""

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
    """Return the launcher for devices of a type of torch's; None where no kernel can be compiled for them."""
    find = LAUNCHERS.get(device_type)
    return find() if find else None


def binary_of(program: Program, target: str, compiler: Any) -> str:
    """Return the path of the machine code. target: "sm_90" or "gfx90a"; compiler: CuPy's module for NVRTC or hipRTC.

    Raises HpcllmError with what the compiler says.
    """
    options = (*(HIPRTC_OPTIONS if torch.version.hip else NVRTC_OPTIONS), *program.defines())
    options = (f"--gpu-architecture={target}", *options)
    key = sha256(repr((program.text(), options, compiler.getVersion())).encode()).hexdigest()[:24]
    path = Path(_folder()) / f"{program.source}-{key}.bin"
    if not path.exists():
        code = _compile(program, options, compiler)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:  # other processes may do the same
            aside.write(code)
        Path(aside.name).rename(path)
    return str(path)


def _compile(program: Program, options: tuple[str, ...], compiler: Any) -> bytes:
    handle = compiler.createProgram(program.text(), f"{program.source}.cu", (), ())
    try:
        compiler.compileProgram(handle, options)
        code: bytes = compiler.getPTX(handle) if torch.version.hip else compiler.getCUBIN(handle)
    except compiler.NVRTCError as error:
        log = compiler.getProgramLog(handle)
        raise HpcllmError(f"kernels of {program.source}.cu with {' '.join(options)}: {error}\n{log}") from error
    finally:
        compiler.destroyProgram(handle)
    return code


@cache
def _folder() -> str:
    """Return the folder kept on this node, or one of this process alone."""
    return cache_folder() or tempfile.mkdtemp(prefix="hpcllm-kernels-")
