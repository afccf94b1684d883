"""Every kernel is made into whole machine code by the compilers of devices, without one, and fits its launch."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from compilers import clang, library
from emulated import EMULATOR, emulated, on_the_cpu, why_not
from emulated.every_kernel import HEADS, start_codec, start_model, start_rotary, start_update
from hypothesis import given
from hypothesis import strategies as st
from registers import SLACK, expected, most_registers

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
MOST_STACK_BYTES = 16  # what a call takes; a spill of a loop takes more
MOST_SCALAR_SPILLS = 72  # AMD's: to lanes of vector registers, not to memory; `measure` of exp 32, `backward_rows` 70


def programs() -> list[compilation.Program]:
    found = [emulated(name, dtype).program for name, dtype in CODECS]
    updates = [fused_adamw.program(dtype) for dtype in (BF16, FP16, FP32)]
    return [*(sum_program(dtype, wire) for dtype, wire in SUMS), *found, *fused_programs(), *updates]


def fused_programs() -> list[compilation.Program]:
    """Kernels of the model: each for 16 and for 32 bits."""
    rows = [fused.program("rows", dtype, parts=(f"{part}.cuh",)) for dtype in (BF16, FP32) for part in ROWS]
    heads = [(f"CHANNELS={channels}", f"ROTATED={rotated}") for channels, rotated in HEADS]
    rotary = [fused.program("rotary", dtype, *macros) for dtype in (BF16, FP32) for macros in heads]
    norms = [fused.norm_program(dtype, width) for dtype in (BF16, FP32) for width in (64, 2048)]
    return [*rows, *norms, *rotary, *(fused.program("swiglu", dtype) for dtype in (BF16, FP16, FP32))]


def test_no_text_is_left_out():
    for folder in {program.folder for program in programs()}:
        there = {name for program in programs() if program.folder == folder for name in program.names}
        assert {path.name for path in folder.glob("*.cu*")} - {"common.cuh"} == there


class Recorder:
    """A Launcher that counts the arguments of each kernel, and runs those whose headers the host reads."""

    def __init__(self):
        self.arguments: dict[tuple[str, ...], dict[str, int]] = {}  # by texts, then kernel

    def launch(self, program, kernel, groups, arguments):
        of_texts = self.arguments.setdefault(program.names, {})
        assert of_texts.setdefault(kernel, len(arguments)) == len(arguments)
        if program.source in ("exponent", "mpc"):
            EMULATOR.launch(program, kernel, groups, arguments)


@cache
def launched() -> dict[tuple[str, ...], dict[str, int]]:
    """{texts: {kernel: number of its arguments}} of all that codecs and model start."""
    recorder = Recorder()
    for name, dtype in itertools.product(["bf16", *(name for name, _ in CODECS)], (FP32, BF16)):
        start_codec(device_codec(find_codec(name, dtype), recorder, "", "emulated"), 1000)
    with on_the_cpu(recorder):
        for width in (200, 2100):
            start_model(BF16, 3, width)
        start_rotary(FP32, 3, *HEADS[0])
    start_update(recorder, BF16, 300)
    return recorder.arguments


def arguments_of(names: tuple[str, ...]) -> dict[str, int]:
    """{kernel: number of its arguments} of a program with these texts, some of which are started as others' alone."""
    return {kernel: n for of, counts in launched().items() if {*of} <= {*names} for kernel, n in counts.items()}


def answers(script, arguments, jobs):
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{script} crashed: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


def assert_fits(target, found):
    """Find whole machine code, of kernels that take what is handed over and as many registers as the table says."""
    for program, answer in zip(programs(), found, strict=True):
        assert answer["end_bytes"] == answer["bytes"], program
        takes = answer["kernels"]
        assert {kernel: of["parameters"] for kernel, of in takes.items()} == arguments_of(program.names), program
        for kernel, of in takes.items():
            assert of["stack_bytes"] <= MOST_STACK_BYTES, (program, kernel, of)
            assert of.get("vector_spills", 0) == 0, (program, kernel, of)
            assert of.get("scalar_spills", 0) <= MOST_SCALAR_SPILLS, (program, kernel, of)
    most, table = most_registers([program.names for program in programs()], found), expected(target)
    assert most.keys() == table.keys()
    both = {kernel: (most[kernel], table[kernel]) for kernel in table}
    assert not {kernel: pair for kernel, pair in both.items() if pair[0] > pair[1] + SLACK}, "found, in the table"
    assert not {kernel: pair for kernel, pair in both.items() if pair[0] < pair[1] - 3 * SLACK}, "lower the table"


FIFTH = "compiles all kernels, a fifth of a minute"
every_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=pytest.mark.full(reason=FIFTH, in_ci=target == "sm_90"))
        for target in ("sm_75", "sm_80", "sm_90", "sm_100", "compute_80")
    ],
)


@every_target
def test_cupy_and_nvrtc_make_whole_machine_code_without_spills_that_takes_what_is_handed_over(target):
    if why_not():
        pytest.skip(why_not())
    jobs = [[program.source, program.macros, program.parts, str(program.folder)] for program in programs()]
    found = answers("cuda_binaries.py", [target], jobs)
    if target.startswith("compute"):
        assert all(answer["is_text"] for answer in found)
    else:
        assert_fits(target, found)


@pytest.mark.parametrize(
    ("compiler", "target"),
    [
        pytest.param("hiprtc", "gfx90a", marks=pytest.mark.full(reason=FIFTH)),
        pytest.param("clang", "gfx942", marks=pytest.mark.full(reason=FIFTH, in_ci=True)),
    ],
)
def test_compilers_for_amd_do_so_too(compiler, target):
    if why_not():
        pytest.skip(why_not())
    if not (clang(target) if compiler == "clang" else library(compiler)):
        pytest.skip(f"no {compiler} for {target} is installed: tests/codecs/gpu/install.sh")
    jobs = [[program.text(), *compilation.HIPRTC_OPTIONS, *program.defines()] for program in programs()]
    found = answers("compilers.py", [compiler, target], jobs)
    rejected = {program: answer["log"] for program, answer in zip(programs(), found, strict=True) if answer["log"]}
    assert not rejected, "\n\n".join(f"{program}:\n{log[:2000]}" for program, log in rejected.items())
    assert_fits(target, found)


def test_a_text_that_is_wrong_is_rejected():
    for compiler, target in (("nvrtc", "sm_80"), ("hiprtc", "gfx90a")):
        if library(compiler) is None:
            continue
        jobs = [["KERNEL kernel(u64 x) { nonsense }"], ['extern "C" __global__ void kernel(int* x) { *x = 1; }']]
        wrong, right = answers("compilers.py", [compiler, target], jobs)
        assert "error" in wrong["log"]
        assert right["log"] == ""


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
