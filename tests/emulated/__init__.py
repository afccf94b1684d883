"""Kernels of devices on the CPU: compiled by g++ with emulator.h, run on CPU tensors and on those of "pretend".

    Emulator(32)   warps of NVIDIA's: the lines of common.cuh for NVRTC
    Emulator(64)   wavefronts of AMD's: the lines for hipRTC

The library is kept in a folder under a hash of its text, so that tests compile each kernel once on a machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.catalogue import device_codec
from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LAUNCHERS, THREADS, WORD, Launcher, blocks_of, check_aligned, launcher_of

HEADER = Path(__file__).parent / "emulator.h"
# -fno-strict-aliasing: bytes are looked at as words, which the compilers of devices allow
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wextra"]
IGNORED = [
    "-Wno-unused-function",
    "-Wno-unused-const-variable",
    "-Wno-unused-variable",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
]
VENDORS = {32: "-D__CUDACC__", 64: "-D__HIPCC_RTC__"}
PARAMETERS = 12
# an exchange is known by its line in the text of a codec, though all of them happen in the lines of common.cuh
EXCHANGES = ("shuffle", "shuffle_xor", "shuffle_up", "shuffle_down", "votes", "any_lane", "sum_up_to", "transposed")
MARKS = "\n".join(f"#define {name}(...) (emulator::at(__LINE__), {name}(__VA_ARGS__))" for name in EXCHANGES)


def why_not() -> str:
    """What is missing; nothing where kernels can be emulated."""
    return "" if shutil.which("g++") else "kernels are emulated by g++, which is not here"


@dataclass(frozen=True)
class Emulator:
    """A Launcher. Groups that the last block of a launch has too many are run too, as a device would.

    lanes: of a wave, 32 or 64; options: of g++.
    """

    lanes: int = 32
    options: tuple[str, ...] = ("-O1",)

    def launch(self, program: Program, kernel: str, groups: int, arguments: Sequence[torch.Tensor | int]) -> None:
        assert len({argument.device for argument in arguments if isinstance(argument, torch.Tensor)}) == 1
        check_aligned(program, arguments)
        words = (ctypes.c_uint64 * PARAMETERS)(*map(_word, arguments))
        library, message = self.library(program), ctypes.create_string_buffer(200)
        count = ctypes.c_uint64(blocks_of(groups) * THREADS // self.lanes)
        with _told(program, kernel, arguments):
            failed = library.emulate(ctypes.cast(library[kernel], ctypes.c_void_p), words, count, message, len(message))
        if failed:
            raise AssertionError(f"{program} {kernel}: {message.value.decode()}")

    def library(self, program: Program) -> ctypes.CDLL:
        return _library(program, (*self.options, f"-DWAVE={self.lanes}", VENDORS[self.lanes]))


EMULATOR, WAVEFRONTS = Emulator(32), Emulator(64)


def emulated(name: str, dtype: torch.dtype, launcher: Emulator = EMULATOR) -> Codec:
    """The codec with kernels, for CPU tensors and for those of "pretend"."""
    return device_codec(find_codec(name, dtype), launcher, "", "emulated")


@contextmanager
def on_the_cpu(launcher: Launcher) -> Iterator[None]:
    """Let the launcher start the model's kernels, on CPU tensors."""
    with mock.patch.dict(LAUNCHERS, cpu=lambda: launcher):
        launcher_of.cache_clear()
        yield
    launcher_of.cache_clear()


def _word(argument: torch.Tensor | int) -> int:
    if not isinstance(argument, torch.Tensor):
        return argument & WORD
    if argument.device.type == "cpu":
        return argument.data_ptr()
    import pretend

    return pretend.native().behind(argument.data_ptr()) if argument.numel() else 0


def _told(program: Program, kernel: str, arguments: Sequence[torch.Tensor | int]) -> AbstractContextManager[None]:
    """Let the pretended device know what the kernel reads and writes, as its text says; pointers to const are read.

    Within the context the memory holds what the kernel may know.
    """
    if all(argument.is_cpu for argument in arguments if isinstance(argument, torch.Tensor)):
        return nullcontext()
    import pretend

    touched: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for is_read, argument in zip(_reads(program, kernel), arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            touched[is_read].append(argument)
    told: AbstractContextManager[None] = pretend.native().launch(kernel, touched[True], touched[False])
    return told


@cache
def _reads(program: Program, kernel: str) -> list[bool]:
    """Tell of each parameter if the kernel only reads what it points to."""
    found = re.search(rf"KERNEL\s+{kernel}\(([^)]*)\)", program.text())
    assert found, f"{program} has no kernel {kernel}"
    return [parameter.strip().startswith("const ") for parameter in found[1].split(",")]


@cache
def _library(program: Program, options: tuple[str, ...]) -> ctypes.CDLL:
    common, mark, rest = program.text().partition('\n#line 1 "')
    text = f'#include "{HEADER}"\n{common}\n{MARKS}{mark}{rest}'
    command = ["g++", *FLAGS, *options, *IGNORED, *program.defines(), "-x", "c++", "-"]
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
