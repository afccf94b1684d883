"""Counting memory: exactly what is alive, and no bit of a result changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.training.memory import LiveBytes, held_bytes
from tests.model.variants import VARIANTS, random_tokens


def test_a_storage_counts_once_from_its_birth_to_its_death():
    before = torch.zeros(100)
    with LiveBytes() as live:
        a = torch.ones(10)
        assert live.now == 40
        b, c = a.view(2, 5)[1], a.add_(1)
        before.mul_(2)
        d = torch.from_numpy(np.zeros(7, np.float32)).add_(1)
        assert live.now == 40
        e = torch.empty(3, dtype=torch.bfloat16)
        assert live.now == 46
        del a, c
        assert live.now == 46
        del b, e
        assert live.now == 0
    assert live.peak == 46
    assert d.sum() == 7


def test_what_a_graph_saves_counts_until_the_backward_pass():
    x = torch.ones(1000, requires_grad=True)
    with LiveBytes() as live:
        y = x.exp().sum()
        assert live.now >= 4000
        y.backward()
        del y
        assert live.now == 4000  # the gradient
        x.grad = None
        assert live.now == 0


def test_resized_storages_count_as_large_as_they_are():
    flat = torch.ones(1000)
    flat.untyped_storage().resize_(0)
    with LiveBytes([flat, flat[:0]]) as live:
        torch.ones(10)
        flat.untyped_storage().resize_(4000)
        torch.ones(5)
        flat.untyped_storage().resize_(0)
        torch.ones(2)
    assert live.peak == 4020


def test_held_bytes_looks_at_storages():
    a = torch.zeros(10)
    assert held_bytes([a, a[:5], a.view(2, 5), torch.zeros(1, dtype=torch.float64)]) == 48


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_bit_changes(name):
    model = VARIANTS[name]
    decoder = build(model, split_layers(model, 1)[0], seed=1)
    tokens = random_tokens(model, 2, 9)

    def gradients() -> list[torch.Tensor]:
        decoder.zero_grad()
        decoder(tokens).square().sum().backward()
        return [p.grad.clone() for p in decoder.parameters()]

    want = gradients()
    with LiveBytes():
        got = gradients()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
