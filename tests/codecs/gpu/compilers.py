"""The compilers of devices, which need none: NVRTC and hipRTC, called as CuPy calls them. A script, since they crash.

    python compilers.py nvrtc sm_80 < [[text, option, ..], ..] in JSON     -> a log for each in JSON, "" if it was taken
    python compilers.py hiprtc gfx90a < ..

libnvrtc comes with the wheel nvidia-cuda-nvrtc or a CUDA toolkit, hipRTC with ROCm or Debian's libamdhip64-5.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path

NAMES = {  # libraries that may have it, the newest first
    "nvrtc": [f"libnvrtc.so.{version}" for version in (13, 12)] + ["libnvrtc.so"],
    "hiprtc": ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so", "libamdhip64.so.6", "libamdhip64.so.5"],
}


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


def compile_one(compiler: str, found: ctypes.CDLL, text: str, options: Sequence[str]) -> str:
    """What the compiler says against the text; nothing if it made code of it."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> int:
        return int(getattr(found, compiler + name)(*arguments))

    words = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    call("CreateProgram", ctypes.byref(program), text.encode(), b"kernels", 0, None, None)
    failed = call("CompileProgram", program, len(options), words)
    call("GetProgramLogSize", program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(1, size.value))
    call("GetProgramLog", program, log)
    if not failed:
        failed = call("GetCUBINSize" if compiler == "nvrtc" else "GetCodeSize", program, ctypes.byref(size)) or not size
    call("DestroyProgram", ctypes.byref(program))
    return log.value.decode(errors="replace") or f"{compiler}: error {failed}" if failed else ""


def main() -> None:
    compiler, target = sys.argv[1:]
    found = library(compiler)
    assert found is not None
    logs = [
        compile_one(compiler, found, text, [f"--gpu-architecture={target}", *options])
        for text, *options in json.load(sys.stdin)
    ]
    print(json.dumps(logs))


if __name__ == "__main__":
    main()
