"""Lossless codecs of variable rate: every bit comes back, and bytes that no encoder wrote do no harm."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.errors import CodecError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CANARY = 0xA5
every_codec = pytest.mark.parametrize(
    "codec",
    [find_codec(name, dtype) for name in ("exp", "mpc") for dtype in DTYPES],
    ids=lambda c: f"{c.name}-{c.dtype}",
)


def bits(values):
    return values.view(BITS[values.dtype])


def values_of(kind, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "any bits":
        size = dtype.itemsize
        return torch.from_numpy(rng.integers(0, 1 << 8 * size, n, dtype=f"u{size}").view(f"i{size}")).view(dtype)
    values = rng.standard_normal(n)
    if kind == "rows":
        values *= np.exp(rng.normal(-6, 1, -(-n // 64))).repeat(64)[:n]
    if kind == "holes":
        values[rng.random(n) < 0.6] = 0
    if kind == "specials":
        values[rng.random(n) < 0.3] = np.nan
        values[rng.random(n) < 0.2] = np.inf
        values[rng.random(n) < 0.2] = -0.0
        values[rng.random(n) < 0.2] = 1e-40
    if kind == "one":
        values[:] = values[:1]
    if kind == "scales":
        values *= np.exp2(rng.integers(-30, 30, n))
    return torch.from_numpy(values.astype("f4")).to(dtype)


KINDS = ("any bits", "normal", "rows", "holes", "specials", "one", "scales")


def encode(codec, values, slack=8):
    """The bytes, and a check that nothing was written past the bound."""
    room = torch.full((codec.encoded_bytes(values.numel()) + slack,), CANARY, dtype=torch.uint8)
    data = codec.encode(values, room[: codec.encoded_bytes(values.numel())])
    assert torch.all(room[codec.encoded_bytes(values.numel()) :] == CANARY)
    assert data.data_ptr() == room.data_ptr()
    return data.clone()


def decode(codec, data, n):
    """The values, and a check that nothing was written beside them."""
    room = torch.zeros(n + 16, dtype=codec.dtype)
    room.view(torch.uint8)[:] = CANARY
    try:
        codec.decode(data, room[8 : 8 + n])
    finally:
        assert torch.all(room[:8].view(torch.uint8) == CANARY)
        assert torch.all(room[8 + n :].view(torch.uint8) == CANARY)
    return room[8 : 8 + n]


@every_codec
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 32, 33, 1023, 1024, 1025, 2047, 5000])
def test_every_bit_comes_back(codec, kind, n):
    values = values_of(kind, n, codec.dtype)
    data = encode(codec, values)
    assert codec.used_bytes(torch.cat([data, torch.full((99,), CANARY, dtype=torch.uint8)]), n) == data.numel()
    assert data.numel() <= codec.encoded_bytes(n)
    assert torch.equal(bits(decode(codec, data, n)), bits(values))
    assert torch.equal(encode(codec, values), data)


@every_codec
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bits_come_back_at_any_address(codec, data):
    size = codec.dtype.itemsize
    content = np.frombuffer(data.draw(st.binary(max_size=4200)), np.uint8)
    content = content[: content.size // size * size].repeat(data.draw(st.integers(1, 5)))
    values = torch.from_numpy(content[: content.size // size * size].view(f"i{size}").copy()).view(codec.dtype)
    shift = data.draw(st.integers(0, 7))
    room = torch.empty(shift + codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    encoded = codec.encode(values, room[shift:])
    assert torch.equal(bits(decode(codec, encoded, values.numel())), bits(values))


@every_codec
@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_widened_and_added_exactly(codec, kind):
    values = values_of(kind, 3000, codec.dtype)
    data = encode(codec, values)
    wide = torch.empty(3000)
    codec.decode(data, wide)
    same = (wide.view(torch.int32) == values.float().view(torch.int32)) | values.isnan()
    assert torch.all(same)
    assert torch.equal(wide.isnan(), values.isnan())
    total = torch.linspace(-1, 1, 3000)
    expected = total + values.float()
    codec.decode_add(data, total)
    assert torch.equal(total.nan_to_num(7.5), expected.nan_to_num(7.5))


@every_codec
def test_threads_and_cuts_change_nothing(codec, monkeypatch):
    """The bodies of an array are those of its parts, cut at blocks."""
    n = 500 * codec.block + 77
    values = values_of("rows", n, codec.dtype)
    data = encode(codec, values)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(encode(codec, values), data)
    assert torch.equal(bits(decode(codec, data, n)), bits(values))
    damaged = data.clone()
    damaged[16 + 400 * codec.format.record_bytes :][: codec.format.record_bytes] = 253
    with pytest.raises(CodecError, match="tile 400 of 501"):
        decode(codec, damaged, n)
    monkeypatch.undo()
    bodies = lambda data, n: data[16 + -(-n // codec.block) * codec.format.record_bytes :]  # noqa: E731
    cut = 200 * codec.block
    parts = [bodies(encode(codec, values[:cut]), cut), bodies(encode(codec, values[cut:]), n - cut)]
    assert torch.equal(torch.cat(parts), bodies(data, n))


@every_codec
def test_wrong_lengths_are_rejected(codec):
    values = values_of("rows", 3000, codec.dtype)
    data = encode(codec, values)
    for wrong in (0, 1, 15, 16, data.numel() // 2, data.numel() - 1):
        with pytest.raises(CodecError):
            decode(codec, data[:wrong], 3000)
    with pytest.raises(CodecError):
        decode(codec, torch.cat([data, data[:4]]), 3000)
    for n in (0, 2999, 3001, 1 << 40):
        with pytest.raises(CodecError, match="values"):
            codec.used_bytes(data, n)
    claim = data.clone()
    claim.numpy()[:8].view("<u8")[0] = 1 << 62
    with pytest.raises(CodecError, match="4611686018427387904"):
        codec.used_bytes(claim, 3000)


@every_codec
@pytest.mark.parametrize("kind", ["any bits", "rows", "holes", "one"])
def test_flipped_bits_do_no_harm(codec, kind):
    """A stream with a bit wrong, or several bytes, is rejected or gives other values: nothing beside is touched."""
    n = 2 * codec.block + 100
    data = encode(codec, values_of(kind, n, codec.dtype))
    rng, rejected, table_end = np.random.default_rng(1), 0, 16 + 3 * codec.format.record_bytes
    places = [*range(8 * table_end), *rng.integers(8 * table_end, 8 * data.numel() + 1, 400) - 1]
    for place in places:
        damaged = data.clone()
        damaged[place // 8] ^= 1 << (place % 8)
        if place % 3 == 0:
            damaged[rng.integers(16, data.numel(), 4)] = torch.from_numpy(rng.integers(0, 256, 4, dtype="u1"))
        try:
            decode(codec, damaged, n)
            codec.decode_add(damaged, torch.zeros(n))
        except CodecError:
            rejected += 1
    assert rejected >= 128  # all of the header's, at least


@every_codec
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_streams_do_no_harm(codec, data):
    """A right header before random records and bodies."""
    n = data.draw(st.integers(0, 2 * codec.block + 40))
    least = 16 + -(-n // codec.block) * codec.format.record_bytes
    used = data.draw(st.integers(least, codec.encoded_bytes(n)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    stream = rng.integers(0, data.draw(st.sampled_from([2, 5, 256])), used, dtype="u1")
    stream[:16].view("<u8")[:] = used, n
    with contextlib.suppress(CodecError):
        decode(codec, torch.from_numpy(stream), n)
