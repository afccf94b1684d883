"""int8, int4 and fp8 on a device: the bytes and the values of the CPU's codecs, on every input; and sums in one kernel.

The kernels' own text, run by g++ in lanes that take turns: see tests/emulated. int8 by torch's operations, too.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from codec_cases import CANARY, Guarded, bits, cases, encoded
from emulated import EMULATOR, WAVEFRONTS, emulated, why_not
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import VALUE_TYPES, device_codec
from hpcllm.codecs.gpu import torch_int8
from hpcllm.errors import CodecError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

FP32, BF16, FP16 = VALUE_TYPES
KERNELS = [  # each kind of code, each type of values, blocks that share a step, of several steps, of more than wait
    ("int8:256", FP32), ("int8:256", BF16), ("int8:256", FP16), ("int8:32", FP32), ("int8:4096", BF16),
    ("int8:64:sr", FP32), ("int4:128", FP32), ("int4:128", FP16), ("int4:1024:sr", BF16), ("fp8:128", FP32),
    ("fp8:128", BF16), ("fp8:2048", FP16),
]  # fmt: skip
PLAIN = [("int8:32", FP32), ("int8:256", BF16), ("int8:256", FP16)]
SUMS = [
    ("int8:256", FP32), ("int8:32", BF16), ("int8:2048", FP16), ("int8:64:sr", FP32), ("int4:128", BF16),
    ("fp8:128", FP32), ("raw", FP32), ("raw", BF16), ("bf16", FP32), ("bf16", FP16), ("fp16", BF16), ("fp16", FP16),
]  # fmt: skip


def pair(name, dtype, launcher):
    """(the codec of the CPU, that of the device), which without a launcher runs torch's operations."""
    host = find_codec(name, dtype)
    kind = {EMULATOR: "", WAVEFRONTS: "wavefronts ", None: "plain "}[launcher]
    label = f"{kind}{name}-{str(dtype)[6:]}"
    return pytest.param(host, device_codec(host, launcher, "", "xpu"), id=label)


every_wave = pytest.mark.parametrize("launcher", [EMULATOR, WAVEFRONTS], ids=["warps", "wavefronts"])
every_pair = pytest.mark.parametrize(
    ("host", "on_device"),
    [pair(*codec, EMULATOR) for codec in KERNELS]
    + [pair(*codec, WAVEFRONTS) for codec in KERNELS]
    + [pair(*codec, None) for codec in PLAIN],
)


def assert_same(ours, truth, exactly=False):
    """The same bits, but for which NaN it is: there, machines differ."""
    numbers = torch.ones_like(truth, dtype=torch.bool) if exactly else ~torch.isnan(truth)
    assert torch.equal(bits(ours)[numbers], bits(truth)[numbers])
    assert torch.all(torch.isnan(ours[~numbers]))


@every_pair
@settings(max_examples=12)
@given(case=cases, index=st.sampled_from([0, 96, (1 << 32) - 4096, 1 << 40]))
def test_the_same_bytes_and_the_same_values(host, on_device, case, index):
    values = case.values(host.dtype)
    before, room = bits(values), Guarded(host.encoded_bytes(case.n), case.shift)
    data = on_device.encode(values, room.data(), index)
    assert torch.equal(data, encoded(host, values, index))
    assert room.intact()
    assert torch.equal(bits(values), before)
    for dtype in (host.dtype, torch.float32):
        out, truth = Guarded(case.n * dtype.itemsize, case.shift), torch.empty(case.n, dtype=dtype)
        host.decode(data, truth)
        on_device.decode(data, out.values(dtype))
        assert_same(out.values(dtype), truth, exactly=dtype == torch.float32)
        assert out.intact()


@every_pair
@settings(max_examples=12)
@given(n=st.integers(0, 5000), seed=st.integers(0, 1 << 30), shift=st.integers(0, 5))
def test_any_bytes_decode_to_what_the_cpu_makes_of_them(host, on_device, n, seed, shift):
    random = np.random.default_rng(seed)
    data = torch.from_numpy(random.integers(0, 256, host.encoded_bytes(n), dtype="u1"))
    start = torch.from_numpy(random.standard_normal(n).astype("f4"))
    for decode in ("decode", "decode_add"):
        room, truth = Guarded(4 * n, shift), start.clone()
        room.values(torch.float32).copy_(start)
        getattr(host, decode)(data, truth)
        getattr(on_device, decode)(data, room.values(torch.float32))
        assert_same(room.values(torch.float32), truth)
        assert room.intact()


@pytest.mark.parametrize("name", ["int8:256", "int4:128", "fp8:128", "zfp:8", "exp", "mpc"])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_an_encoding_between_words_is_rejected_and_not_read(name, shift):
    host, on_device = find_codec(name), emulated(name, FP32)
    values, room = torch.randn(1000), torch.empty(host.encoded_bytes(1000) + 4, dtype=torch.uint8)
    with pytest.raises(CodecError, match="multiple of 4"):
        on_device.encode(values, room[shift:])
    data = host.encode(values, room[4:]).clone()
    moved = torch.empty(len(data) + shift, dtype=torch.uint8)[shift:].copy_(data)
    with pytest.raises(CodecError, match="multiple of 4"):
        on_device.decode(moved, torch.empty(1000))


@every_pair
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_bytes_of_a_wrong_length_are_rejected(host, on_device, n):
    out = torch.full((n,), 77.0)
    for size in (host.encoded_bytes(n) + 16, max(0, host.encoded_bytes(n) - 1)):
        data = torch.zeros(size, dtype=torch.uint8)
        for decode in (on_device.decode, on_device.decode_add) if size != host.encoded_bytes(n) else ():
            with pytest.raises(CodecError, match=str(size)):
                decode(data, out)
    assert torch.all(out == 77)


def test_int8_by_torch_is_the_same_in_parts_of_any_length(monkeypatch):
    host, values = find_codec("int8:32"), torch.randn(1000)
    monkeypatch.setattr(torch_int8, "PART_VALUES", 96)
    assert torch.equal(encoded(device_codec(host, None, "", "xpu"), values), encoded(host, values))


@pytest.mark.parametrize(
    ("host", "on_device"), [pair(*codec, launcher) for launcher in (EMULATOR, WAVEFRONTS) for codec in SUMS]
)
@settings(max_examples=8)
@given(case=cases, ranks=st.integers(1, 6), own=st.integers(0, 5), index=st.sampled_from([0, 1 << 40]))
def test_a_sum_in_one_kernel_is_that_of_the_single_steps(host, on_device, case, ranks, own, index):
    own, n, bytes_ = own % ranks, case.n, host.encoded_bytes(case.n)
    addends = [dataclasses.replace(case, seed=case.seed + rank).values(host.dtype) for rank in range(ranks)]
    parts = torch.full((ranks, -(-bytes_ // 4) * 4 + 4 * case.shift + 4), CANARY, dtype=torch.uint8)
    total = torch.empty(n)
    for rank, values in enumerate(addends):
        if rank != own:
            parts[rank, :bytes_] = encoded(host, values, index)
        add(host, total, rank, values if rank == own else parts[rank, :bytes_])
    sums, room = total.to(host.dtype), Guarded(bytes_, case.shift)
    truth = torch.empty_like(sums)
    host.decode(encoded(host, sums, index), truth)
    mine = addends[own]
    data = on_device.sum_encode(parts, own, mine, room.data(), index)
    assert_same(mine, truth)
    if not torch.any(torch.isnan(truth)):
        assert torch.equal(data, encoded(host, sums, index))
    assert room.intact()


def add(host, total, rank, addend):
    """One step of the sum on the CPU: an addend of my own, or the encoding of one."""
    if addend.dtype != torch.uint8:
        total.copy_(addend) if rank == 0 else total.add_(addend)
    elif rank == 0:
        host.decode(addend, total)
    else:
        host.decode_add(addend, total)


@every_wave
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_becomes_the_right_one_of_16_bits(launcher, wire):
    """A sum of one rank: its own values, rounded once. All 16-bit numbers, and fp32 around all of them."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    near = torch.cat([every.view(dtype).float().view(torch.int32) for dtype in (torch.bfloat16, torch.float16)])
    floats = torch.cat([near + step for step in (-1, 0, 0xFFF, 0x1000, 0x8000, 0x8001)])
    for values in (floats.view(torch.float32), every.view(torch.bfloat16), every.view(torch.float16)):
        name = "bf16" if wire == torch.bfloat16 else "fp16"
        out = torch.empty(2 * values.numel(), dtype=torch.uint8)
        data = emulated(name, values.dtype, launcher).sum_encode(
            torch.empty(1, out.numel(), dtype=torch.uint8), 0, values.clone(), out
        )
        assert_same(data.view(wire), values.to(wire))


def test_rows_that_cannot_hold_an_encoding_are_rejected():
    codec, own = emulated("int8:256", torch.float32), torch.zeros(1000)
    out = torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8)
    rows = torch.empty(3, out.numel() + 16, dtype=torch.uint8)
    for parts, rank in ((rows[:, :100], 0), (rows, 3), (torch.empty(3, 2 * out.numel(), dtype=torch.uint8)[:, ::2], 0)):
        with pytest.raises(CodecError, match=f"rank {rank} of 3"):
            codec.sum_encode(parts, rank, own, out)


@pytest.mark.parametrize("name", ["int8:256", "int4:64:sr", "fp8:128"])
def test_what_a_device_codec_says_of_itself_is_what_the_codec_says(name):
    host, on_device = find_codec(name), emulated(name, torch.float32)
    values = np.random.default_rng(1).standard_normal(10_000)
    assert np.array_equal(on_device.bound(values), host.bound(values))
    for attribute in ("name", "dtype", "lossless", "fixed_rate", "block", "key"):
        assert getattr(on_device, attribute) == getattr(host, attribute)
