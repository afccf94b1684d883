"""What must come out, against a sum made plainly; and how far from it a codec may be, wherever its blocks begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.codecs import find_codec
from hpcllm.perf.values import PERIOD, allowed_copy, codec_ratio, expected, pattern, unroll

SIZES = [1, 5, 1000, PERIOD + 77]


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(n, dtype=dtype)
    unroll(pattern(rank, dtype), 0, out)
    return out


def joined(operation: str, size: int, rank: int, ranks: int) -> np.ndarray:
    pieces = []
    for segment in expected(operation, size, rank, ranks, find_codec("raw"), "ring"):
        out = torch.empty(segment.count, dtype=torch.float64)
        unroll(torch.from_numpy(segment.exact), segment.start, out)
        pieces.append(out.numpy())
    return np.concatenate(pieces)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_exact_result_is_that_of_the_definition(size, ranks):
    x = [values(rank, ranks * size).double().numpy() for rank in range(ranks)]
    total = np.sum([row[:size] for row in x], axis=0)
    for rank in range(ranks):
        chunk = slice(size * rank // ranks, size * (rank + 1) // ranks)
        want = {
            "allreduce": total,
            "reduce_scatter": total[chunk],
            "allgather": np.concatenate([row[:size] for row in x]),
            "alltoall": np.concatenate([row[rank * size : (rank + 1) * size] for row in x]),
            "broadcast": x[0][:size],
        }
        for operation, result in want.items():
            np.testing.assert_allclose(joined(operation, size, rank, ranks), result, rtol=1e-12, atol=0)


def test_values_are_like_gradients():
    x = values(0, PERIOD).reshape(-1)[: PERIOD // 256 * 256].reshape(-1, 256)
    sizes = x.square().mean(1).sqrt()
    assert 1e-4 < sizes.median() < 1e-2
    assert sizes.max() / sizes.min() > 100  # rows differ by orders of magnitude
    assert abs(float(torch.corrcoef(torch.stack([values(0, PERIOD), values(1, PERIOD)]))[0, 1])) < 0.01


@pytest.mark.parametrize("n", [64, 256, 4096, 65536])
def test_no_part_of_a_round_size_is_like_another(n):
    x = values(0, 64 * n)
    parts = {x[start : start + n].numpy().tobytes() for start in range(0, 64 * n, n)}
    assert len(parts) == 64


@pytest.mark.parametrize("name", ["raw", "bf16", "fp16", "int8:256", "int4:128", "fp8", "zfp:12"])
@pytest.mark.parametrize("offset", [0, 1, 100, 255])
def test_a_codec_is_within_the_allowance_wherever_it_begins(name, offset):
    try:
        codec = find_codec(name)
    except KeyError:
        pytest.skip(f"{name} is not built yet")
    x = values(0, 40_000)[offset:]
    decoded = torch.empty_like(x)
    codec.decode(codec.encode(x, torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)), decoded)
    error = (decoded.double() - x.double()).abs().numpy()
    allowed = allowed_copy(0, codec)[offset:40_000]
    assert (error <= allowed).all()
    if not codec.lossless:
        assert np.median(allowed) < 0.5 * float(x.abs().median()) * (8 if name.startswith("int4") else 1)
        assert codec_ratio(name, torch.float32) > 1.2
