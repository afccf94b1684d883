"""Kernels stay as short as they are: instructions a value, counted in the emulator, under ceilings.

The ceilings are a tenth above what was counted, so that a kernel which got slower is seen without a device.
"""

from __future__ import annotations

import pytest
import torch
from emulated import why_not
from instructions import instructions, model_instructions, why_not_counted

pytestmark = pytest.mark.skipif(bool(why_not() or why_not_counted()), reason=why_not() or why_not_counted())
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TRAPS = "a trap after each instruction: up to half a minute"
slow = pytest.mark.full(reason=TRAPS)
slow_in_ci = pytest.mark.full(reason=TRAPS, in_ci=True)
CEILINGS = [  # lanes, values
    pytest.param("int8:256", FP32, 32, 1024, {"encode": 50, "decode": 26, "sum_encode": 165}, marks=slow_in_ci),
    pytest.param("int8:256", FP32, 64, 512, {"encode": 56, "decode": 28, "sum_encode": 169}, marks=slow),
    pytest.param("int4:128", FP16, 32, 512, {"encode": 93, "decode": 53, "sum_encode": 275}, marks=slow),
    pytest.param("fp8:128", BF16, 32, 512, {"encode": 73, "decode": 56, "sum_encode": 277}, marks=slow),
    ("bf16", FP32, 32, 512, {"sum_encode": 101}),
    ("zfp:8", FP32, 32, 512, {"encode": 113, "decode": 119}),
    ("zfp:8", FP32, 64, 512, {"encode": 115, "decode": 124}),
    ("zfp:8", BF16, 32, 512, {"encode": 114, "decode": 137}),
    ("zfp:16", FP32, 32, 512, {"encode": 164, "decode": 156}),
    pytest.param("exp", BF16, 32, 1024, {"measure": 104, "write": 93, "read": 102}, marks=slow_in_ci),
    pytest.param("mpc", FP32, 32, 256, {"measure": 300, "write": 325, "read": 504}, marks=slow),
]
MODEL_CEILINGS = {
    "swiglu": {"forward": 58, "backward": 88},
    # add_parts: of 2 rows; it adds up its lanes once a column, however many there are
    "rms_norm": {"forward": 62, "backward_rows": 107, "add_parts": 2240},
    "rotary": {"rotary": 73},
    "cross_entropy": {"statistics": 37, "gradient": 50},
}


@pytest.mark.parametrize(("name", "dtype", "lanes", "n", "ceilings"), CEILINGS)
def test_a_kernel_issues_no_more_instructions_than_it_did(name, dtype, lanes, n, ceilings):
    counted, _ = instructions(name, dtype, n, lanes)
    check(counted, ceilings)


@pytest.mark.parametrize(
    ("name", "ceilings"),
    [
        pytest.param(name, ceilings, id=name, marks=pytest.mark.full(reason=TRAPS, in_ci=name == "swiglu"))
        for name, ceilings in MODEL_CEILINGS.items()
    ],
)
def test_a_kernel_of_the_model_does_not_either(name, ceilings):
    check(model_instructions(name, BF16), ceilings)


def check(counted, ceilings):
    assert {kernel: counted[kernel] for kernel in ceilings if counted[kernel] > ceilings[kernel]} == {}
    assert all(counted[kernel] > ceiling / 2 for kernel, ceiling in ceilings.items()), "lower the ceilings"
