"""Codecs on a GPU: the bytes and the values of those on the CPU, whatever the values are."""

from __future__ import annotations

import pytest
import torch
from codec_cases import SPECIAL, bits, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.casts import Cast
from hpcllm.codecs.catalogue import VALUE_TYPES

NAMES = (
    "raw",
    "bf16",
    "fp16",
    "int8:32",
    "int8:256",
    "int8:256:sr",
    "int4:128",
    "int4:256:sr",
    "fp8:128",
    "exp",
    "mpc",
)
RATES = ("zfp:3", "zfp:8", "zfp:16", "zfp:32")
every_codec = pytest.mark.parametrize("name", [*NAMES, *RATES])
every_type = pytest.mark.parametrize("dtype", VALUE_TYPES, ids=str)


def twins(name: str, dtype: torch.dtype, device: torch.device):
    try:
        return find_codec(name, dtype), find_codec(name, dtype, device.type)
    except ValueError as error:
        pytest.skip(str(error))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, but for which NaN it is: there, machines differ (hpcllm/codecs/protocol.py)."""
    numbers = ~torch.isnan(want)
    assert torch.equal(bits(got)[numbers], bits(want)[numbers])
    assert torch.all(torch.isnan(got[~numbers]))


def check(name: str, values: torch.Tensor, device: torch.device, index: int = 0) -> None:
    """values: on the CPU, wherever they begin in their memory."""
    host, twin = twins(name, values.dtype, device)
    n = values.numel()
    want = host.encode(values, torch.empty(host.encoded_bytes(n), dtype=torch.uint8), index)
    got = twin.encode(values.to(device), torch.empty(host.encoded_bytes(n), dtype=torch.uint8, device=device), index)
    data = got[: twin.used_bytes(got, n)].cpu()
    if isinstance(host, Cast):
        same(data.view(host.wire), want.view(host.wire))
    else:
        assert torch.equal(data, want)
    for dtype in {values.dtype, torch.float32}:
        on_host, on_device = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype, device=device)
        host.decode(want, on_host)
        twin.decode(want.to(device), on_device)
        same(on_device.cpu(), on_host)
    total, sums = torch.ones(n), torch.ones(n, device=device)
    host.decode_add(want, total)
    twin.decode_add(want.to(device), sums)
    same(sums.cpu(), total)


@every_codec
@every_type
@settings(max_examples=40)
@given(case=cases, index=st.sampled_from([0, 1, 1 << 33]))
def test_any_values_have_the_bits_of_the_cpu(device, name, dtype, case, index):
    check(name, case.values(dtype), device, index)


@every_codec
@every_type
def test_a_long_array_with_everything_in_it_has_them_too(device, name, dtype):
    """Longer than any grid of blocks that a kernel may stop at: 2^25 values and a ragged end."""
    torch.manual_seed(0)
    values = (torch.randn((1 << 25) + 13) * torch.exp2(torch.randint(-60, 60, ((1 << 25) + 13,)))).to(dtype)
    values[:: 1 << 16] = torch.tensor(SPECIAL[0], dtype=dtype)
    values[7 :: 1 << 17] = torch.tensor(SPECIAL[1], dtype=dtype)
    check(name, values, device)


@every_codec
@every_type
def test_all_16_bit_patterns_or_as_many_of_32(device, name, dtype):
    count = 1 << 16 if dtype.itemsize == 2 else 1 << 24
    patterns = torch.arange(count, dtype=torch.int64) * (1 if dtype.itemsize == 2 else 257)
    check(name, patterns.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype), device)


@pytest.mark.parametrize("name", ["raw", "bf16", "int8:256", "int4:128", "fp8:128", "zfp:8"])
def test_codecs_of_fixed_rate_only_hand_over_work(device, no_waiting, name):
    """A step that waits for its device inside a sum leaves it idle; torch raises for each call that would wait."""
    host, twin = twins(name, torch.float32, device)
    values, n = torch.randn(10_000).to(device), 10_000
    out = torch.empty(host.encoded_bytes(n), dtype=torch.uint8, device=device)
    with no_waiting():
        data = twin.encode(values, out)
        twin.decode(data, values)
        twin.decode_add(data, values)


@pytest.mark.parametrize("name", ["exp", "mpc"])
def test_codecs_of_tiles_wait_once_to_encode_and_not_to_decode(device, no_waiting, name):
    host, twin = twins(name, torch.bfloat16, device)
    values, n = torch.randn(10_000).bfloat16().to(device), 10_000
    out = torch.empty(host.encoded_bytes(n), dtype=torch.uint8, device=device)
    data = twin.encode(values, out)
    twin.decode(data, values)  # makes what lasts
    with no_waiting():
        twin.decode(data, values)
