"""Compilers of devices, which need none: NVRTC and hipRTC, called as CuPy calls them, and clang. A script: they crash.

    python compilers.py nvrtc sm_80 < [[text, option, ..], ..] in JSON  -> [{"log": ..}, ..], "" if the text was taken
    python compilers.py hiprtc gfx90a < ..
    python compilers.py clang gfx942 < ..    and what the machine code says of itself: "bytes", "end_bytes", "kernels"

libnvrtc comes with the wheel nvidia-cuda-nvrtc or a CUDA toolkit, hipRTC with ROCm or Debian's libamdhip64-5, which is
too old for gfx942. Debian's clang 19 is not, and needs nothing of ROCm's but what hip.h says.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from amd_binaries import kernels

from hpcllm.codecs.gpu.compiler import end_bytes

NAMES = {  # libraries that may have it, the newest first
    "nvrtc": [f"libnvrtc.so.{version}" for version in (13, 12)] + ["libnvrtc.so"],
    "hiprtc": ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so", "libamdhip64.so.6", "libamdhip64.so.5"],
}
CODE = {"nvrtc": "CUBIN", "hiprtc": "Code"}
CLANGS = ["clang", *(f"clang-{version}" for version in (22, 21, 20, 19, 18))]  # older ones do not know gfx942
HEADER = Path(__file__).with_name("hip.h")


def library(compiler: str) -> ctypes.CDLL | None:
    """None where the compiler is not installed."""
    wheels = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/lib{compiler}.so.*")]
    for name in [*map(str, sorted(wheels)), *NAMES[compiler], find_library(compiler) or ""]:
        for parts in Path(name).parent.glob(f"lib{compiler}-builtins.so.*"):
            ctypes.CDLL(str(parts))  # NVRTC 13.0 of PyTorch's default wheel does not find them itself
        try:
            found = ctypes.CDLL(name)
            getattr(found, f"{compiler}CreateProgram")
        except (OSError, AttributeError):
            continue
        return found
    return None


def clang(target: str) -> str | None:
    """Name of a clang that makes machine code for one of AMD's devices; None where there is none."""
    for name in filter(shutil.which, CLANGS):
        if not by_clang(name, target, 'extern "C" __global__ void line(int* x) { *x = 1; }', ())[0]:
            return name
    return None


def by_library(compiler: str, found: ctypes.CDLL, text: str, options: Sequence[str]) -> tuple[str, bytes]:
    """(what the compiler says against the text, its machine code); one of them is empty."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> int:
        return int(getattr(found, compiler + name)(*arguments))

    words = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    call("CreateProgram", ctypes.byref(program), text.encode(), b"kernels", 0, None, None)
    failed = call("CompileProgram", program, len(options), words)
    call("GetProgramLogSize", program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(1, size.value))
    call("GetProgramLog", program, log)
    size.value = 0
    if not failed:
        failed = call(f"Get{CODE[compiler]}Size", program, ctypes.byref(size)) or not size.value
    code = ctypes.create_string_buffer(max(1, size.value))
    if not failed:
        failed = call(f"Get{CODE[compiler]}", program, code)
    call("DestroyProgram", ctypes.byref(program))
    return (log.value.decode(errors="replace") or f"{compiler}: error {failed}", b"") if failed else ("", code.raw)


def by_clang(name: str, target: str, text: str, options: Sequence[str]) -> tuple[str, bytes]:
    command = [name, "-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", f"--offload-arch={target}"]
    command += ["-nogpuinc", "-nogpulib", "-include", str(HEADER), "-O3", "-fno-math-errno", *options]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.hsaco"
        done = subprocess.run([*command, "-", "-o", out], input=text, capture_output=True, text=True, timeout=100)
        return (done.stderr or f"exit code {done.returncode}", b"") if done.returncode else ("", out.read_bytes())


def answer(compiler: str, target: str, found: Any, text: str, options: Sequence[str]) -> dict[str, object]:
    if compiler == "clang":
        log, code = by_clang(found, target, text, options)
    else:
        log, code = by_library(compiler, found, text, [f"--gpu-architecture={target}", *options])
    if log or compiler == "nvrtc":  # whose machine code cuda_binaries.py reads
        return {"log": log}
    return {"log": "", "bytes": len(code), "end_bytes": end_bytes(code), "kernels": kernels(code)}


def main() -> None:
    compiler, target = sys.argv[1:]
    found = clang(target) if compiler == "clang" else library(compiler)
    assert found is not None
    print(json.dumps([answer(compiler, target, found, text, options) for text, *options in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
