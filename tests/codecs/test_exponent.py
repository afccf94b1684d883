"""`exp`: what it is for shrinks as promised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.codecs import find_codec
from hpcllm.errors import CodecError

N = 1 << 18


def ratio(values):
    codec = find_codec("exp", values.dtype)
    room = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    return values.numel() * values.itemsize / codec.encode(values, room).numel()


def gradient(dtype, spread=1.0, row=256, scale=2.0**-10):
    """Normal values whose rows have scales drawn log-normally, as rows of weight gradients have."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((N // row, row)) * np.exp(rng.normal(0, spread, (N // row, 1))) * scale
    return torch.from_numpy(rows.astype("f4").ravel()).to(dtype)


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.38), (torch.float32, 1.16), (torch.float16, 1.1)])
@pytest.mark.parametrize("row", [64, 256, 4096])
def test_gradients_shrink(dtype, least, row):
    assert ratio(gradient(dtype, row=row)) >= least


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-10, 1.0, 2.0**60])
def test_the_scale_does_not_matter(scale):
    assert ratio(gradient(torch.bfloat16, scale=scale)) == ratio(gradient(torch.bfloat16))


def test_the_window_is_close_to_the_entropy():
    """Within 10 % of what an ideal code of the exponents would take, rows of one scale."""
    values = gradient(torch.bfloat16, spread=0.0)
    counts = np.bincount(values.view(torch.int16).numpy().view("u2") >> 7 & 255)
    p = counts[counts > 0] / N
    ideal = 8 - np.sum(p * np.log2(p))
    assert 16 / ideal >= ratio(values) >= 0.9 * 16 / ideal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_untouched_rows_are_nearly_free(dtype):
    """Of an embedding's gradient only the rows of the batch's tokens are not zero."""
    values = gradient(dtype).view(-1, 1024)
    whole = ratio(values.flatten())
    values[torch.arange(values.shape[0]) % 10 != 0] = 0
    assert ratio(values.flatten()) >= 9 * whole
    assert ratio(torch.zeros(N, dtype=dtype)) >= 100 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_does_not_grow(dtype):
    """By more than the table: 8 bytes a tile."""
    noise = np.random.default_rng(0).integers(0, 256, N * dtype.itemsize, dtype="u1")
    assert ratio(torch.from_numpy(noise).view(dtype)) >= 1 / (1 + 9 / (1024 * dtype.itemsize))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_are_held_against_the_planes(dtype):
    """A record with one escape, or one far byte, more or less is rejected, also where the body's length hides it."""
    codec, n = find_codec("exp", dtype), 1000
    values = gradient(dtype)[:n].clone()
    values[::50] *= 2.0**14 if dtype == torch.float16 else 2.0**40
    data = codec.encode(values, torch.empty(codec.encoded_bytes(n), dtype=torch.uint8)).clone()
    counts = data[16:24].numpy().view("<i2")  # mode and window, escapes, far bytes, 0
    assert counts[1] > counts[2]
    for place in (1, 2):
        for change in (-1, 1):
            counts[place] += change
            with pytest.raises(CodecError):
                codec.decode(data, torch.empty(n, dtype=dtype))
            counts[place] -= change
    codec.decode(data, torch.empty(n, dtype=dtype))


def test_what_fills_a_short_tile_is_no_escape():
    """It is copies of the first value, here one that needs a far byte."""
    codec, values = find_codec("exp", torch.bfloat16), gradient(torch.bfloat16)[:1000].clone()
    values[0] = 2.0**100
    data = codec.encode(values, torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8))
    assert data[20:24].tolist() == [1, 0, 0, 0]
