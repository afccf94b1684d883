"""Machine code of kernels: compiled once on a node for each text, its macros and each kind of device, and kept there.

    text, options, target, version of the compiler  --sha256-->  file name  --is it there?-->  path
                                                                    `- no: NVRTC or hipRTC, which need no device

CuPy has a cache of its own, but it compiles with denormals flushed to zero and takes no option against it (issue 9576
of cupy/cupy). The bits of an encoding must not depend on the device, so arithmetic has to be IEEE's: denormals are
kept, divisions rounded to nearest, a product and a sum not fused. The first two are defaults of both compilers, the
last of neither. Sources: NVIDIA, "NVRTC", supported compile options; LLVM, "Clang command line argument reference", and
review D101654 for division. The folder is that of codecs/kernels.py: only this user can write to it, and it is not in
a home folder, which thousands of ranks would read at once.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hpcllm.codecs.kernels import cache_folder
from hpcllm.errors import HpcllmError

NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
HIPRTC_OPTIONS = (
    "--std=c++17", "-ffp-contract=off", "-fno-gpu-flush-denormals-to-zero", "-fhip-fp32-correctly-rounded-divide-sqrt"
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A source text in this folder, and what its macros stand for: Program("quantise", ("VALUE=Fp32", "BLOCK=256"))."""

    source: str
    macros: tuple[str, ...]
    parts: tuple[str, ...] = ()  # texts that come after the source and use what it defines: "streams.cuh"

    def text(self) -> str:
        """With common.cuh before it and no #include."""
        names = ["common.cuh", f"{self.source}.cu", *self.parts]
        return "\n".join(f'#line 1 "{name}"\n{(Path(__file__).parent / name).read_text()}' for name in names)

    def defines(self) -> tuple[str, ...]:
        return tuple(f"-D{macro}" for macro in self.macros)


def binary_of(program: Program, target: str, compiler: Any) -> str:
    """Path of the program's machine code. target: "sm_90" or "gfx90a"; compiler: CuPy's module for NVRTC or hipRTC.

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
    """Kept on this node, or of this process alone."""
    return cache_folder() or tempfile.mkdtemp(prefix="hpcllm-kernels-")
