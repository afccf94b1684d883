"""Every kernel is taken by the compilers of devices, none of which is here: for A100 and H100, and for MI250X."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compilers import library
from emulated import emulated

from hpcllm.codecs.gpu import launch
from hpcllm.codecs.gpu.device_codecs import sum_program

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CODECS = [  # each text, with each kind of code and of value
    ("int8:256", FP32), ("int8:64:sr", BF16), ("int4:512", FP16), ("fp8:128", BF16),
    ("exp", FP16), ("mpc", FP32), ("zfp:8", FP32),
]  # fmt: skip
SUMS = [(FP32, BF16), (BF16, FP16), (FP16, FP32)]
FOLDER = Path(launch.__file__).parent
OPTIONS = {"nvrtc": launch.NVRTC_OPTIONS, "hiprtc": launch.HIPRTC_OPTIONS}
SCRIPT = Path(__file__).parent / "compilers.py"


def programs() -> list[launch.Program]:
    found = [emulated(name, dtype).program for name, dtype in CODECS]
    return [sum_program(dtype, wire) for dtype, wire in SUMS] + found


def test_no_text_is_left_out():
    assert {path.stem for path in FOLDER.glob("*.cu")} == {program.source for program in programs()}
    parts = {part for program in programs() for part in program.parts}
    assert {path.name for path in FOLDER.glob("*.cuh")} == {"common.cuh", *parts}


OLDER = pytest.param("nvrtc", "sm_80", marks=pytest.mark.full(reason="compiles for 10 s, as sm_90 does"))


@pytest.mark.parametrize(("compiler", "target"), [OLDER, ("nvrtc", "sm_90"), ("hiprtc", "gfx90a")])
def test_a_compiler_takes_it(compiler, target):
    if library(compiler) is None:
        pytest.skip(f"{compiler} is not installed: tests/codecs/gpu/install.sh")
    jobs = [[program.text(), *OPTIONS[compiler], *program.defines()] for program in programs()]
    command = [sys.executable, str(SCRIPT), compiler, target]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{compiler} crashed: {done.stderr[-2000:]}"
    rejected = {program: log for program, log in zip(programs(), json.loads(done.stdout), strict=True) if log}
    assert not rejected, "\n\n".join(f"{program}:\n{log[:2000]}" for program, log in rejected.items())


def test_a_text_that_is_wrong_is_rejected():
    for compiler, target in (("nvrtc", "sm_80"), ("hiprtc", "gfx90a")):
        if library(compiler) is None:
            continue
        jobs = [["KERNEL kernel(u64 x) { nonsense }"], ['extern "C" __global__ void kernel(int* x) { *x = 1; }']]
        command = [sys.executable, str(SCRIPT), compiler, target]
        done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=110)
        wrong, right = json.loads(done.stdout)
        assert "error" in wrong
        assert right == ""
