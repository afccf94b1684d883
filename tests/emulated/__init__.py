"""Kernels of devices on the CPU: compiled by g++ with emulator.h, run on CPU tensors and on those of "pretend".

The library is kept in a folder under a hash of its text, so that tests compile each kernel once on a machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.catalogue import device_codec
from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LANES, THREADS, WORD, blocks_of, check_aligned

HEADER = Path(__file__).parent / "emulator.h"
# -fno-strict-aliasing: bytes are looked at as words, which the compilers of devices allow
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wextra"]
IGNORED = ["-Wno-unused-function", "-Wno-unused-const-variable", "-Wno-psabi"]
PARAMETERS = 12


def why_not() -> str:
    """What is missing; nothing where kernels can be emulated."""
    return "" if shutil.which("g++") else "kernels are emulated by g++, which is not here"


class Emulator:
    """A Launcher. Groups that the last block of a launch has too many are run too, as a device would."""

    def launch(self, program: Program, kernel: str, groups: int, arguments: list[torch.Tensor | int]) -> None:
        assert len({argument.device for argument in arguments if isinstance(argument, torch.Tensor)}) == 1
        check_aligned(program, arguments)
        words = (ctypes.c_uint64 * PARAMETERS)(*map(_word, arguments))
        library, message = _library(program), ctypes.create_string_buffer(200)
        count = ctypes.c_uint64(blocks_of(groups) * THREADS // LANES)
        if library.emulate(ctypes.cast(library[kernel], ctypes.c_void_p), words, count, message, len(message)):
            raise AssertionError(f"{program} {kernel}: {message.value.decode()}")


EMULATOR = Emulator()


def emulated(name: str, dtype: torch.dtype) -> Codec:
    """The codec with kernels, for CPU tensors and for those of "pretend"."""
    return device_codec(find_codec(name, dtype), EMULATOR, "", "emulated")


def _word(argument: torch.Tensor | int) -> int:
    if not isinstance(argument, torch.Tensor):
        return argument & WORD
    if argument.device.type == "cpu":
        return argument.data_ptr()
    import pretend

    return pretend.native().behind(argument.data_ptr()) if argument.numel() else 0


@cache
def _library(program: Program) -> ctypes.CDLL:
    text = f'#include "{HEADER}"\n{program.text()}'
    command = ["g++", *FLAGS, *IGNORED, *program.defines(), "-x", "c++", "-"]
    key = hashlib.sha256("\n".join([*command, text, HEADER.read_text()]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"hpcllm-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{program.source}-{key}.so"
    if not target.exists():
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _compile(command, text, target)
    return ctypes.CDLL(str(target))


def _compile(command: list[str], text: str, target: Path) -> None:
    aside = target.with_suffix(".tmp")
    done = subprocess.run([*command, "-o", str(aside)], input=text, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise AssertionError(f"g++ rejected {target.name}:\n{done.stderr[:4000]}")
    aside.rename(target)
