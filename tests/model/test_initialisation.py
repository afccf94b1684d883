"""Initial weights: a pure function of seed, name and global index, with the spread of GPT-2's scheme."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.config.schema import ModelConfig
from hpcllm.model import initialisation
from hpcllm.model.initialisation import build, normal_slab
from hpcllm.model.shapes import shard_of, split_layers
from hpcllm.model.tensor_parallel import TensorParallel
from tests.model.variants import VARIANTS, whole


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 300), count=st.integers(0, 300))
def test_any_slab_is_a_part_of_the_whole(seed, start, count):
    assert torch.equal(normal_slab(seed, "x", start, count), normal_slab(seed, "x", 0, 600)[start : start + count])


def test_slabs_far_inside_a_huge_tensor_agree_where_they_overlap():
    far = 10**12 + 3
    assert torch.equal(normal_slab(0, "x", far, 100)[10:], normal_slab(0, "x", far + 10, 90))


def test_seed_and_name_both_matter():
    slabs = [normal_slab(seed, name, 0, 1000) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(slabs):
        for other in slabs[:i]:
            # independent: the correlation of 1000 pairs has spread 1/sqrt(1000); five of them
            assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / math.sqrt(1000)


def test_numbers_are_standard_normal():
    n = 10**6
    x = normal_slab(7, "x", 0, n).double()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    for threshold in (-3.0, -1.0, 0.0, 0.5, 2.0):  # the distribution function itself, within five standard errors
        p = 0.5 * math.erfc(-threshold / math.sqrt(2))
        assert abs((x < threshold).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
    neighbours = (x[1:] * x[:-1]).mean()
    assert abs(neighbours) < 5 / math.sqrt(n)


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_holds_the_bits_of_the_whole_model(model, stages):
    one = dict(build(model, whole(model), seed=5).named_parameters())
    for span in split_layers(model, stages):
        for name, weight in build(model, span, seed=5).named_parameters():
            assert torch.equal(weight, one[name]), name


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_a_tp_rank_holds_its_part_of_the_bits_of_the_whole_model(monkeypatch, model, size, dtype):
    """Rows, columns, tables whose vocabulary does not divide; also in pieces that end inside a row."""
    model = dataclasses.replace(model, heads=4, kv_heads=4, head_channels=8)  # divisible by every size
    one = dict(build(model, whole(model), seed=5).named_parameters())
    monkeypatch.setattr(initialisation, "CHUNK", 101)
    for rank in range(size):
        tp = TensorParallel(rank=rank, size=size)
        for name, weight in build(model, whole(model), 5, tp, dtype).named_parameters():
            start, shape = shard_of(name, tuple(one[name].shape), rank, size)
            part = one[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
            assert weight.dtype == dtype
            assert torch.equal(weight, part.to(dtype)), name


def test_chunks_do_not_show(monkeypatch):
    model = VARIANTS["llama"]
    want = build(model, whole(model), seed=0).state_dict()
    monkeypatch.setattr(initialisation, "CHUNK", 7)
    got = build(model, whole(model), seed=0).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("layers", [1, 8])
def test_spread_follows_the_scheme(layers):
    model = ModelConfig(layers=layers, hidden=128, heads=4, ffn=256, vocabulary=300)
    for name, weight in build(model, whole(model), seed=0).named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            want = 0.02 / math.sqrt(2 * layers) if residual else 0.02
            assert abs(weight.std().item() / want - 1) < 5 / math.sqrt(2 * weight.numel()), name
