"""Laws of every codec: bounds, lossless bits, what is no number, cuts, buffers, hostile bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_cases import Guarded, bits, cases, decoded, encoded
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import VALUE_TYPES
from hpcllm.codecs.names import examples, parse_name
from hpcllm.errors import CodecError

VARIANTS = ["int8:32", "int8:4096", "int8:64:sr", "int4:32", "int4:256:sr", "fp8:32", "zfp:3", "zfp:8", "zfp:32"]
CODECS = [find_codec(name, dtype) for name in examples() + VARIANTS for dtype in VALUE_TYPES]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}-{str(codec.dtype)[6:]}")


@every_codec
@settings(max_examples=25)
@given(case=cases)
def test_what_comes_back_is_within_the_bound(codec, case):
    values = case.values(codec.dtype)
    exact = values.double().numpy()
    data = encoded(codec, values)
    bound = codec.bound(exact)
    assert bound.shape == exact.shape
    assert np.all(bound >= 0) or not np.all(np.isfinite(exact))
    for dtype in (codec.dtype, torch.float32):
        back = decoded(codec, data, case.n, dtype)
        ok = np.isfinite(exact) & (bound < np.inf)
        assert np.all(np.abs(back.double().numpy()[ok] - exact[ok]) <= bound[ok])
        assert not torch.any(torch.isfinite(back) & ~torch.isfinite(values)), "a value that is no number became one"
        if codec.lossless:
            numbers = ~torch.isnan(values)
            assert torch.equal(bits(back.to(codec.dtype))[numbers], bits(values)[numbers])
            assert torch.all(torch.isnan(back[~numbers]))
        if dtype == codec.dtype and codec.lossless:
            assert torch.equal(bits(back), bits(values))


@every_codec
@settings(max_examples=15)
@given(case=cases)
def test_memory_around_the_buffers_stays_as_it_is(codec, case):
    values = case.values(codec.dtype)
    before = bits(values)
    room = Guarded(codec.encoded_bytes(case.n), case.shift)
    data = codec.encode(values, room.data())
    assert room.intact()
    assert data.numel() == codec.used_bytes(data, case.n) <= codec.encoded_bytes(case.n)
    assert codec.fixed_rate == (codec.name not in ("exp", "mpc"))
    for dtype in {codec.dtype, torch.float32}:
        out = Guarded(case.n * dtype.itemsize, case.shift)
        codec.decode(data, out.values(dtype))
        assert out.intact()
    assert torch.equal(bits(values), before)


@every_codec
@settings(max_examples=15)
@given(case=cases)
def test_equal_values_give_equal_bytes_wherever_they_lie(codec, case):
    values = case.values(codec.dtype)
    dirty = Guarded(codec.encoded_bytes(case.n), case.shift)
    assert torch.equal(codec.encode(values.clone(), dirty.data()), encoded(codec, values))


@every_codec
@settings(max_examples=15)
@given(case=cases)
def test_decode_add_is_one_fp32_addition(codec, case):
    data = encoded(codec, case.values(codec.dtype))
    start = torch.from_numpy(np.random.default_rng(case.seed).standard_normal(case.n).astype("f4"))
    room = Guarded(4 * case.n, case.shift)
    room.values(torch.float32).copy_(start)
    codec.decode_add(data, room.values(torch.float32))
    expected = start + decoded(codec, data, case.n, torch.float32)
    numbers = ~torch.isnan(expected)
    assert torch.equal(bits(room.values(torch.float32))[numbers], bits(expected)[numbers])
    assert torch.all(torch.isnan(room.values(torch.float32)[~numbers]))
    assert room.intact()


@every_codec
@settings(max_examples=10)
@given(case=cases, cut=st.floats(0, 1), index=st.sampled_from([0, 4096, (1 << 32) - 4096, 1 << 40]))
def test_cuts_at_blocks_do_not_change_a_bit(codec, case, cut, index):
    values = case.values(codec.dtype)
    where = min(round(cut * case.n / codec.block) * codec.block, case.n)
    whole = decoded(codec, encoded(codec, values, index), case.n, codec.dtype)
    parts = [(values[:where], index), (values[where:], index + where)]
    joined = torch.cat([decoded(codec, encoded(codec, part, at), part.numel(), codec.dtype) for part, at in parts])
    if not codec.lossless:  # PyTorch's casts write another NaN in the last values of an array than in the others
        joined, whole = (torch.where(values.isnan(), torch.nan, values) for values in (joined, whole))
    assert torch.equal(bits(joined), bits(whole))


@every_codec
@pytest.mark.parametrize("n", [0, 1, 5, 1000])
def test_bytes_of_a_wrong_length_are_rejected_and_nothing_is_written(codec, n):
    data = encoded(codec, torch.randn(n).to(codec.dtype))
    for wrong in (data[:-1], data[:4], data[:0], torch.cat([data, torch.zeros(16, dtype=torch.uint8)])):
        if wrong.numel() == data.numel():
            continue
        out = torch.full((n,), 77.0, dtype=torch.float32)
        for decode in (codec.decode, codec.decode_add):
            with pytest.raises(CodecError, match=str(wrong.numel())):
                decode(wrong, out)
        assert torch.all(out == 77)


@every_codec
@settings(max_examples=25)
@given(n=st.integers(0, 3000), seed=st.integers(0, 1 << 30), flips=st.integers(0, 40), shift=st.integers(0, 5))
def test_hostile_bytes_reach_nothing_outside(codec, n, seed, flips, shift):
    random = np.random.default_rng(seed)
    data = encoded(codec, torch.from_numpy(random.standard_normal(n)).to(codec.dtype))
    if flips == 0:
        data = torch.from_numpy(random.integers(0, 256, data.numel(), dtype="u1"))
    elif data.numel():
        data[torch.from_numpy(random.integers(0, min(data.numel(), 1 << int(random.integers(1, 15))), flips))] ^= int(
            random.integers(1, 256)
        )
    room = Guarded(data.numel(), shift)
    room.data().copy_(data)
    out = Guarded(4 * n, shift)
    out.values(torch.float32).zero_()
    for decode in (codec.decode, codec.decode_add):
        try:
            decode(room.data(), out.values(torch.float32))
        except CodecError:
            assert not codec.fixed_rate, "bytes of a fixed rate can all be decoded"
    assert out.intact()
    assert room.intact()
    assert torch.equal(room.data(), data)


@every_codec
def test_a_name_says_what_travels(codec):
    n = 1 << 20
    bits_a_value = parse_name(codec.name).bits(8 * codec.dtype.itemsize)
    assert find_codec(codec.name, codec.dtype) == codec
    assert codec.lossless == parse_name(codec.name).lossless or codec.name in ("bf16", "fp16")
    if codec.fixed_rate:
        assert codec.encoded_bytes(n) * 8 / n == pytest.approx(bits_a_value, rel=1e-3)
    assert all(codec.encoded_bytes(k) <= codec.encoded_bytes(k + 1) for k in range(2 * codec.block))


def test_what_is_no_codec_is_rejected_with_what_would_be():
    with pytest.raises(ValueError, match="int8:256"):
        find_codec("int9")
    with pytest.raises(ValueError, match="int8:32 to int8:4096 in powers of two"):
        find_codec("int8:100")
    with pytest.raises(ValueError, match="float32"):
        find_codec("int8", torch.float64)
