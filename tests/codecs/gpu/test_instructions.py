"""Kernels stay as short as they are: instructions a value, counted in the emulator, under ceilings.

The ceilings are a tenth above what was counted, so that a kernel which got slower is seen without a device.
"""

from __future__ import annotations

import pytest
import torch
from emulated import why_not
from instructions import instructions, why_not_counted

pytestmark = pytest.mark.skipif(bool(why_not() or why_not_counted()), reason=why_not() or why_not_counted())
FP32, BF16 = torch.float32, torch.bfloat16
slow = pytest.mark.full(reason="a trap after each instruction: up to half a minute")
CEILINGS = [
    pytest.param("int8:256", FP32, 1024, {"encode": 50, "decode": 26, "sum_encode": 165}, marks=slow),
    ("zfp:8", FP32, 512, {"encode": 113, "decode": 119}),
    ("zfp:8", BF16, 512, {"encode": 114, "decode": 137}),
    ("zfp:16", FP32, 512, {"encode": 164, "decode": 156}),
    pytest.param("exp", BF16, 1024, {"measure": 104, "write": 93, "read": 102}, marks=slow),
]


@pytest.mark.parametrize(("name", "dtype", "n", "ceilings"), CEILINGS)
def test_a_kernel_issues_no_more_instructions_than_it_did(name, dtype, n, ceilings):
    counted, _ = instructions(name, dtype, n)
    assert {kernel: counted[kernel] for kernel in ceilings if counted[kernel] > ceilings[kernel]} == {}
    assert all(counted[kernel] > ceiling / 2 for kernel, ceiling in ceilings.items()), "lower the ceilings"
