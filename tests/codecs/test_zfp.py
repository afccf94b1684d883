"""`zfp`: byte for byte what the zfp library writes, value for value what it reads, and a bound that holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.names import ZFP_RATES
from hpcllm.codecs.zfp_planes import list_bits
from hpcllm.errors import CodecError

zfpy = pytest.importorskip("zfpy")
LEAST = 2.0**-98
WIDE = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) >= LEAST)
KINDS = ("normal", "scales", "smooth", "holes", "small integers", "any bits")


def floats(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n).astype("f4")
    if kind == "scales":
        values *= np.exp2(rng.integers(-90, 100, n)).astype("f4")
    if kind == "smooth":
        values = np.sin(np.arange(n) * 0.01).astype("f4")
    if kind == "holes":
        values[rng.random(n) < 0.7] = 0
    if kind == "small integers":
        values = np.round(values * 3)
    if kind == "any bits":
        values = rng.integers(0, 1 << 32, n, dtype="u4").view("f4")
        values[~np.isfinite(values)] = 1
    values[np.abs(values) < LEAST] = 0
    return values


def encode(values, rate, dtype=torch.float32):
    codec = find_codec(f"zfp:{rate}", dtype)
    room = torch.full((codec.encoded_bytes(len(values)) + 8,), 0xA5, dtype=torch.uint8)
    data = codec.encode(torch.as_tensor(values), room)
    assert torch.all(room[data.numel() :] == 0xA5)
    return data


def decode(data, n, rate, dtype=torch.float32):
    room = torch.full((n + 16,), 123.0, dtype=dtype)
    find_codec(f"zfp:{rate}", dtype).decode(data, room[8 : 8 + n])
    assert torch.all(room[:8] == 123)
    assert torch.all(room[8 + n :] == 123)
    return room[8 : 8 + n]


def library_reads(data, n, rate):
    return zfpy._decompress(data.numpy().tobytes(), zfpy.type_float, (n,), rate=rate)


@pytest.mark.parametrize("rate", ZFP_RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_values_are_the_librarys(rate, kind):
    for n in (1, 2, 3, 4, 5, 63, 64, 65, 1023, 1025, 2100):
        values = floats(kind, n)
        data = encode(values, rate)
        assert data.numpy().tobytes() == zfpy.compress_numpy(values, rate=rate, write_header=False)
        assert np.array_equal(decode(data, n, rate).numpy().view("u4"), library_reads(data, n, rate).view("u4"))


@settings(max_examples=300, deadline=None)
@given(values=st.lists(WIDE, min_size=1, max_size=40), rate=st.sampled_from(ZFP_RATES))
def test_chosen_values_too(values, rate):
    values = np.array(values, "f4")
    data = encode(values, rate)
    assert data.numpy().tobytes() == zfpy.compress_numpy(values, rate=rate, write_header=False)
    assert np.array_equal(decode(data, len(values), rate).numpy(), library_reads(data, len(values), rate))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), n=st.integers(1, 300), rate=st.sampled_from(ZFP_RATES))
def test_any_bytes_are_read_as_the_library_reads_them(seed, n, rate):
    """But for the mark of a block that was not finite, which no library writes."""
    size = find_codec(f"zfp:{rate}").encoded_bytes(n)
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype="u1"))
    ours, theirs = decode(data, n, rate).numpy(), library_reads(data, n, rate)
    assert np.array_equal(ours[~np.isnan(ours)], theirs[~np.isnan(ours)])
    marks = np.isnan(ours[::4]).sum()
    assert marks <= max(3, n / 4 / 32)


@pytest.mark.parametrize("rate", ZFP_RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bound_holds(rate, dtype):
    codec = find_codec(f"zfp:{rate}", dtype)
    for seed, kind in enumerate(KINDS):
        values = torch.from_numpy(floats(kind, 3000, seed)).to(dtype)
        if dtype == torch.float32:
            values[::7] *= 2.0**-60
        values[~values.isfinite()] = 1
        decoded = decode(encode(values, rate, dtype), 3000, rate, dtype)
        exact = values.double().numpy()
        with np.errstate(invalid="ignore"):
            error = np.abs(decoded.double().numpy() - exact)
        bound = codec.bound(exact)
        assert np.all((error <= bound) | np.isinf(bound))
        peak = np.abs(exact).reshape(-1, 4).max(1).repeat(4)
        assert np.all(np.isfinite(bound) | (peak > torch.finfo(dtype).max / 16))


@settings(max_examples=400, deadline=None)
@given(
    integers=st.lists(st.integers(-(1 << 24), 1 << 24), min_size=4, max_size=4),
    scale=st.integers(-80, 60),
    rate=st.sampled_from(ZFP_RATES),
)
def test_bound_holds_for_the_worst_blocks_found(integers, scale, rate):
    values = np.array(integers, "f4") * np.float32(2.0**scale)
    error = np.abs(decode(encode(values, rate), 4, rate).numpy().astype("f8") - values)
    assert np.all(error <= find_codec(f"zfp:{rate}").bound(values.astype("f8")))


def test_planes_that_fit_are_what_the_bound_counts():
    """p planes never take more than 4 p + 3 bits."""
    most = {0: 0}
    for planes in range(1, 33):
        following: dict[int, int] = {}
        for state, bits in most.items():
            for plane in range(16):
                state_after, bits_after = max(state, plane.bit_length()), bits + len(list_bits(state, plane))
                following[state_after] = max(following.get(state_after, 0), bits_after)
        most = following
        assert max(most.values()) <= 4 * planes + 3


@pytest.mark.parametrize("rate", [3, 8, 16, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(rate, dtype, special):
    values = torch.ones(70, dtype=dtype)
    values[[5, 69]] = special
    decoded = decode(encode(values, rate, dtype), 70, rate, dtype)
    assert decoded.isnan().nonzero().flatten().tolist() == [4, 5, 6, 7, 68, 69]
    total = torch.zeros(70)
    find_codec(f"zfp:{rate}", dtype).decode_add(encode(values, rate, dtype), total)
    assert torch.equal(total.isnan(), decoded.isnan())


@pytest.mark.parametrize("rate", [3, 16, 32])
def test_tiny_blocks_are_zeros(rate):
    values = np.array([2.0**-99, -(2.0**-126), 2.0**-149, 0, LEAST, 2.0**-149, 0, 0], "f4")
    decoded = decode(encode(values, rate), 8, rate).numpy()
    assert np.all(decoded[:4] == 0)
    assert rate == 3 or decoded[4] != 0
    assert np.all(np.abs(decoded - values) <= find_codec(f"zfp:{rate}").bound(values.astype("f8")))


@pytest.mark.parametrize("rate", [3, 11, 16])
def test_threads_and_cuts_change_nothing(rate, monkeypatch):
    codec, values = find_codec(f"zfp:{rate}"), floats("normal", 300_001)
    data = encode(values, rate)
    cut = 64 * 1001
    assert torch.equal(torch.cat([encode(values[:cut], rate), encode(values[cut:], rate)]), data)
    whole = decode(data, len(values), rate)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(encode(values, rate), data)
    assert torch.equal(decode(data, len(values), rate), whole)
    total = torch.ones(len(values))
    codec.decode_add(data, total)
    assert torch.equal(total, 1 + whole)


@pytest.mark.parametrize("n", [0, 1, 64, 65])
def test_wrong_lengths_are_rejected(n):
    codec = find_codec("zfp:8")
    data = torch.zeros(codec.encoded_bytes(n) + 8, dtype=torch.uint8)
    codec.decode(data[:-8], torch.empty(n))
    for wrong in (data, data[:-7], data[:-9] if n else data[:-1]):
        with pytest.raises(CodecError, match=f"for {n} values"):
            codec.decode(wrong, torch.empty(n))
