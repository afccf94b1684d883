"""Every kernel is made into whole machine code by the compilers of devices, without one, and fits its launch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compilers import library
from emulated import EMULATOR, emulated, why_not
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import device_codec
from hpcllm.codecs.gpu import compiler as compilation
from hpcllm.codecs.gpu.device_codecs import sum_program
from hpcllm.errors import HpcllmError
from hpcllm.model.gpu import fused
from hpcllm.optim.gpu import fused_adamw

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CODECS = [  # each text, with each kind of code and of value
    ("int8:256", FP32), ("int8:2048", FP32), ("int8:64:sr", BF16), ("int4:512", FP16), ("fp8:128", BF16),
    ("exp", FP16), ("mpc", FP32), ("zfp:8", FP32),
]  # fmt: skip
SUMS = [(FP32, BF16), (BF16, FP16), (FP16, FP32)]
ROWS = ("cross_entropy", "rms_norm")  # parts of a text of the model's
HERE = Path(__file__).parent
MOST_REGISTERS = 128  # of 65,536 on a multiprocessor: 4 blocks of 128 threads stay there
REGISTERS = {"backward_rows": 184}  # whose groups are few, 2 blocks on each: lanes keep sums of their columns there
MOST_STACK_BYTES = 16  # what a call takes; a spill of a loop takes more


def programs() -> list[compilation.Program]:
    found = [emulated(name, dtype).program for name, dtype in CODECS]
    updates = [fused_adamw.program(dtype) for dtype in (BF16, FP16, FP32)]
    return [*(sum_program(dtype, wire) for dtype, wire in SUMS), *found, *fused_programs(), *updates]


def fused_programs() -> list[compilation.Program]:
    """Kernels of the model: each for 16 and for 32 bits."""
    rows = [fused.program("rows", dtype, parts=(f"{part}.cuh",)) for dtype in (BF16, FP32) for part in ROWS]
    heads = [("CHANNELS=128", "ROTATED=128"), ("CHANNELS=80", "ROTATED=20"), ("CHANNELS=6", "ROTATED=2")]
    rotary = [fused.program("rotary", dtype, *macros) for dtype in (BF16, FP32) for macros in heads]
    norms = [fused.norm_program(dtype, width) for dtype in (BF16, FP32) for width in (64, 2048)]
    return [*rows, *norms, *rotary, *(fused.program("swiglu", dtype) for dtype in (BF16, FP16, FP32))]


def test_no_text_is_left_out():
    for folder in {program.folder for program in programs()}:
        there = {name for program in programs() if program.folder == folder for name in program.names}
        assert {path.name for path in folder.glob("*.cu*")} - {"common.cuh"} == there


class Recorder:
    """A Launcher that counts the arguments of each kernel that it starts."""

    def __init__(self) -> None:
        self.arguments: dict[str, int] = {}

    def launch(self, program, kernel, groups, arguments):
        assert self.arguments.setdefault(kernel, len(arguments)) == len(arguments)
        EMULATOR.launch(program, kernel, groups, arguments)


def launched(name, dtype):
    """{kernel: number of its arguments} of all that a codec starts."""
    recorder = Recorder()
    codec = device_codec(find_codec(name, dtype), recorder, "", "emulated")
    values = torch.randn(1000).to(dtype)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8))
    for out in (torch.empty_like(values), torch.empty(1000)):
        codec.decode(data, out)
    codec.decode_add(data, torch.zeros(1000))
    if hasattr(codec, "sum_encode"):
        row = torch.empty(len(data) + 3 & ~3, dtype=torch.uint8)
        codec.sum_encode(torch.stack([row, row])[:, : len(data)], 0, values, torch.empty_like(data))
    return recorder.arguments


def answers(script, arguments, jobs):
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{script} crashed: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


TARGETS = [
    pytest.param(target, marks=pytest.mark.full(reason="compiles all kernels, a fifth of a minute"))
    for target in ("sm_75", "sm_90", "sm_100", "compute_80")
]


@pytest.mark.parametrize("target", TARGETS)
def test_cupy_and_nvrtc_make_whole_machine_code_without_spills_that_takes_what_is_handed_over(target):
    if why_not():
        pytest.skip(why_not())
    jobs = [[program.source, program.macros, program.parts, str(program.folder)] for program in programs()]
    found = answers("cuda_binaries.py", [target], jobs)
    counts = {program: {} for program in programs()}
    for name, dtype in CODECS:
        counts[emulated(name, dtype).program] = launched(name, dtype)
    for program, answer in zip(programs(), found, strict=True):
        if target.startswith("compute"):
            assert answer["is_text"], program
            continue
        assert answer["end_bytes"] == answer["bytes"], program
        assert answer["kernels"].keys() >= counts[program].keys(), program
        for kernel, takes in answer["kernels"].items():
            assert takes["parameters"] == counts[program].get(kernel, takes["parameters"]), (program, kernel)
            assert takes["registers"] <= REGISTERS.get(kernel, MOST_REGISTERS), (program, kernel, takes)
            assert takes["stack_bytes"] <= MOST_STACK_BYTES, (program, kernel, takes)


@pytest.mark.full(reason="compiles for a fifth of a minute")
def test_hiprtc_takes_it():
    if library("hiprtc") is None:
        pytest.skip("hiprtc is not installed: tests/codecs/gpu/install.sh")
    jobs = [[program.text(), *compilation.HIPRTC_OPTIONS, *program.defines()] for program in programs()]
    logs = answers("compilers.py", ["hiprtc", "gfx90a"], jobs)
    rejected = {program: log for program, log in zip(programs(), logs, strict=True) if log}
    assert not rejected, "\n\n".join(f"{program}:\n{log[:2000]}" for program, log in rejected.items())


def test_a_text_that_is_wrong_is_rejected():
    for compiler, target in (("nvrtc", "sm_80"), ("hiprtc", "gfx90a")):
        if library(compiler) is None:
            continue
        jobs = [["KERNEL kernel(u64 x) { nonsense }"], ['extern "C" __global__ void kernel(int* x) { *x = 1; }']]
        wrong, right = answers("compilers.py", [compiler, target], jobs)
        assert "error" in wrong
        assert right == ""


TARGETS = """
from compilers import library
library("nvrtc")
from cupy.cuda import nvrtc
from hpcllm.codecs.gpu.compiler import check_compiler, cuda_target
check_compiler(nvrtc)
newest = max(nvrtc.getSupportedArchs())
print(cuda_target(9, 0, nvrtc), cuda_target(99, 0, nvrtc) == f"compute_{newest}")
print(cuda_target(*divmod(newest, 10), nvrtc) == f"sm_{newest}")
try:
    cuda_target(3, 5, nvrtc)
except Exception as error:
    print(error)
"""


def test_the_target_of_a_device_is_its_own_or_text_for_the_newest_that_the_compiler_knows():
    done = subprocess.run([sys.executable, "-c", TARGETS], cwd=HERE, capture_output=True, text=True, timeout=110)
    newer, newest, older = done.stdout.splitlines()
    assert (newer, newest) == ("sm_90 True", "True"), done.stderr
    assert "this device is sm_35: use one for an older CUDA" in older


def test_a_stream_of_torch_becomes_one_of_cupy_without_a_warning():
    text = "import cupy; from hpcllm.codecs.gpu.launch import cupy_stream; print(cupy_stream(cupy, 4096).ptr)"
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-W", "error::DeprecationWarning:hpcllm"]
    done = subprocess.run([*command, "-c", text], capture_output=True, text=True, timeout=110)
    assert done.stdout == "4096\n", done.stderr


class Missing:
    """A compiler as CuPy shows it where its library is not found."""

    def getVersion(self):  # noqa: N802 -- CuPy's name
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")


class Old:
    def getVersion(self):  # noqa: N802 -- CuPy's name
        return 11, 2


@pytest.mark.parametrize(("compiler", "fix"), [(Missing(), "[ctk]"), (Old(), "12.0 or newer")])
def test_a_compiler_that_cannot_be_used_is_noticed_at_once(compiler, fix):
    with pytest.raises(HpcllmError, match=fix.replace("[", r"\[")):
        compilation.check_compiler(compiler)


def elf(programs: int, sections: int, sections_at: int) -> bytes:
    """A file of nothing but its header and its table of sections; the table of programs is in between."""
    header = bytearray(64)
    header[:6] = compilation.ELF
    struct.pack_into("<QQ", header, 32, 64, sections_at)
    struct.pack_into("<HHHH", header, 54, 56, programs, 64, sections)
    return bytes(header) + bytes(max(56 * programs, sections_at + 64 * sections - 64))


@given(programs=st.integers(0, 5), sections=st.integers(1, 9), gap=st.integers(0, 50), bundled=st.booleans())
def test_the_byte_that_is_left_out_comes_back_and_a_whole_file_stays(programs, sections, gap, bundled):
    code = elf(programs, sections, 64 + 56 * programs + gap)
    if bundled:
        name = b"hipv4-amdgcn-amd-amdhsa--gfx90a"
        at = len(compilation.BUNDLE) + 8 + 24 + len(name)
        code = compilation.BUNDLE + struct.pack("<QQQQ", 1, at, len(code), len(name)) + name + code
    assert compilation.whole(code[:-1]) == code
    assert compilation.whole(code) == code
    with pytest.raises(HpcllmError, match="2 are missing"):
        compilation.whole(code[:-2])
