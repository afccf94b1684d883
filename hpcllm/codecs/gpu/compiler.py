"""Texts of kernels to machine code, once on a node: NVRTC or hipRTC through CuPy, whole files, devices they know.

    common.cuh + quantise.cu + "VALUE=Bf16", ..  --NVRTC or hipRTC-->  machine code, a file of this node
    target: sm_90      the device's own, where the compiler knows it
            compute_90 text for the newest architecture that it knows, which the driver of a newer device translates
            gfx90a     the device's, features included, on ROCm

The name of the file is a hash of text, options, target and version of the compiler; none of them needs a device.

CuPy has a cache of its own, but it compiles with denormals flushed to zero and takes no option against it (issue 9576
of cupy/cupy). The bits of an encoding must not depend on the device, so arithmetic has to be IEEE's: denormals are
kept, divisions rounded to nearest, a product and a sum not fused. The first two are defaults of both compilers, the
last of neither. Sources: NVIDIA, "NVRTC", supported compile options; LLVM, "Clang command line argument reference", and
review D101654 for division. The folder is that of codecs/kernels.py: only this user can write to it, and it is not in
a home folder, which thousands of ranks would read at once.

CuPy hands code out without its last byte, as if it were text with a zero at its end (seen with 14.2): the tables of an
ELF file then end one byte behind the file. `whole` puts back what the file's own header says is missing.
"""

from __future__ import annotations

import struct
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
OLDEST_NVRTC = (12, 0)  # of CUDA; older ones know no sm_90 and were never tried
ELF, ELF_HEADER_BYTES = b"\x7fELF\x02\x01", 64  # 64 bits, little-endian: all that either compiler writes
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"  # of hipRTC: several ELF files behind a table


@dataclass(frozen=True)
class Program:
    """Source text in a folder, with values of its macros: Program("quantise", ("VALUE=Fp32", "BLOCK=256"))."""

    source: str
    macros: tuple[str, ...]
    parts: tuple[str, ...] = ()  # texts that come after the source and use what it defines: "tiles.cuh"
    folder: Path = Path(__file__).parent  # of source and parts

    def text(self) -> str:
        """Return the whole text: common.cuh, the source, the parts; no #include."""
        paths = [Path(__file__).with_name("common.cuh"), *(self.folder / name for name in self.names)]
        return "\n".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in paths)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files in the folder."""
        return f"{self.source}.cu", *self.parts

    def defines(self) -> tuple[str, ...]:
        return tuple(f"-D{macro}" for macro in self.macros)


def target_of(device: Any, compiler: Any) -> str:
    """Return the compiler's target for a device, by torch's properties of it: "gfx90a:sramecc+:xnack-", "sm_90".

    Raises HpcllmError for a device that the compiler does not know.
    """
    if torch.version.hip:
        return str(device.gcnArchName)
    return cuda_target(device.major, device.minor, compiler)


def cuda_target(major: int, minor: int, compiler: Any) -> str:
    """Return NVRTC's target for a device of that compute capability: "sm_90", or "compute_90" for a newer one.

    Raises HpcllmError for a device older than all that it knows.
    """
    own, known = 10 * major + minor, sorted(compiler.getSupportedArchs())
    older = [arch for arch in known if arch <= own]
    if not older:
        version = ".".join(map(str, compiler.getVersion()))
        raise HpcllmError(
            f"NVRTC {version} compiles for sm_{known[0]} and newer, this device is sm_{own}: use one for an older CUDA,"
            f" such as cupy-cuda12x for sm_70"
        )
    return f"sm_{own}" if older[-1] == own else f"compute_{older[-1]}"


def check_compiler(compiler: Any) -> None:
    """Find out whether the compiler is there and new enough. Raises HpcllmError with the fix."""
    try:
        version = compiler.getVersion()
    except Exception as error:  # CuPy: RuntimeError where the library is not found, ImportError from below
        raise HpcllmError(f"CuPy finds no compiler ({error}): install it with one, as in cupy-cuda13x[ctk]") from error
    if not torch.version.hip and version < OLDEST_NVRTC:
        raise HpcllmError(f"NVRTC {'.'.join(map(str, version))} is too old: 12.0 or newer is needed")


def binary_of(program: Program, target: str, compiler: Any) -> str:
    """Return the path of the machine code. target: of the module; compiler: CuPy's module for NVRTC or hipRTC.

    Raises HpcllmError with what the compiler says.
    """
    options = (*(HIPRTC_OPTIONS if torch.version.hip else NVRTC_OPTIONS), *program.defines())
    options = (f"--gpu-architecture={target}", *options)
    key = sha256(repr(("whole", program.text(), options, compiler.getVersion())).encode()).hexdigest()[:24]
    path = Path(_folder()) / f"{program.source}-{key}.bin"
    if not path.exists():
        code = _compile(program.source, program.text(), options, compiler)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:  # other processes may do the same
            aside.write(code)
        Path(aside.name).rename(path)
    return str(path)


def _compile(name: str, text: str, options: tuple[str, ...], compiler: Any) -> bytes:
    handle = compiler.createProgram(text, f"{name}.cu", (), ())
    is_text = any(option.startswith("--gpu-architecture=compute_") for option in options)
    try:
        compiler.compileProgram(handle, options)
        # hipRTC's one way to hand out code is called getPTX
        code: bytes = compiler.getPTX(handle) if torch.version.hip or is_text else compiler.getCUBIN(handle)
    except compiler.NVRTCError as error:
        log = compiler.getProgramLog(handle)
        raise HpcllmError(f"kernels of {name}.cu with {' '.join(options)}: {error}\n{log}") from error
    finally:
        compiler.destroyProgram(handle)
    return code + b"\0" if is_text else whole(code)  # a text ends with a zero for the driver


def whole(code: bytes) -> bytes:
    """Return machine code with the last byte that CuPy left out, a zero of a table's last field, if it did.

    Raises HpcllmError for code of which more is missing.
    """
    missing = end_bytes(code) - len(code)
    if missing > 1:
        raise HpcllmError(f"machine code of {len(code)} bytes, of which {missing} are missing by its own tables")
    return code + bytes(max(0, missing))


def end_bytes(code: bytes) -> int:
    """Return where the tables of machine code end, in bytes; its length where it is no kind of file that we know."""
    if code.startswith(BUNDLE):
        return _bundle_end_bytes(code)
    if not code.startswith(ELF) or len(code) < ELF_HEADER_BYTES:
        return len(code)
    programs_at, sections_at = struct.unpack_from("<QQ", code, 32)
    program_bytes, programs, section_bytes, sections = struct.unpack_from("<HHHH", code, 54)
    return max(int(programs_at + program_bytes * programs), int(sections_at + section_bytes * sections))


def _bundle_end_bytes(code: bytes) -> int:
    """Return the end of the last file in a bundle: a count, then offset, size and length of a name, and the name."""
    (count,) = struct.unpack_from("<Q", code, len(BUNDLE))
    at, end = len(BUNDLE) + 8, 0
    for _ in range(count):
        offset, size, name_bytes = struct.unpack_from("<QQQ", code, at)
        at, end = at + 24 + name_bytes, max(end, offset + size)
    return end


@cache
def _folder() -> str:
    """Return the folder kept on this node, or one of this process alone."""
    return cache_folder() or tempfile.mkdtemp(prefix="hpcllm-kernels-")
