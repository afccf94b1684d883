"""`mpc`: the stream is what the paper's four stages make, done here one bit at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.codecs import find_codec
from hpcllm.errors import CodecError


def reference_tile(words):
    """Bitmap words and words that are not zero, of at most 1024 words."""
    mask = (1 << 32) - 1
    differences = [(int(word) - int(before)) & mask for before, word in zip([0, *words], words, strict=False)]
    differences += [0] * (-len(words) % 32)
    turned = []
    for g in range(0, len(differences), 32):
        group = differences[g : g + 32]
        turned += [sum((word >> lane & 1) << i for i, word in enumerate(group)) for lane in range(32)]
    again = [(word - before) & mask for before, word in zip([0, *turned], turned, strict=False)]
    bitmap = [sum((word != 0) << i for i, word in enumerate(again[g : g + 32])) for g in range(0, len(again), 32)]
    return np.array([*bitmap, *(word for word in again if word)], np.uint32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 31, 64, 333, 1024, 2500])
def test_stages_are_the_papers(dtype, n):
    values = torch.from_numpy(np.sin(np.arange(n) * 0.1).astype("f4")).to(dtype)
    codec = find_codec("mpc", dtype)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(n), dtype=torch.uint8)).numpy()
    raw = values.view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 4), np.uint32)
    tiles = [reference_tile(words[i : i + 1024]) for i in range(0, len(words), 1024)]
    groups = [-(-min(1024, len(words) - i) // 32) for i in range(0, len(words), 1024)]
    assert data[16 : 16 + 4 * len(tiles)].view("<u4").tolist() == [
        t.size - g for t, g in zip(tiles, groups, strict=True)
    ]
    assert np.array_equal(data[16 + 4 * len(tiles) :], np.concatenate(tiles).view(np.uint8))


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1.08), (torch.bfloat16, 1.25)])
def test_gradients_shrink_a_little(dtype, least):
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 16).astype("f4") * 2**-9).to(dtype)
    codec = find_codec("mpc", dtype)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8))
    assert values.numel() * values.itemsize / data.numel() >= least


def test_bitmaps_are_held_against_the_record():
    codec, n = find_codec("mpc"), 200
    data = codec.encode(torch.linspace(0, 1, n), torch.empty(codec.encoded_bytes(n), dtype=torch.uint8))
    for bit in range(32 * -(-n // 32)):
        damaged = data.clone()
        damaged[20 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError, match="tile 0 of 1"):
            codec.decode(damaged, torch.empty(n))
