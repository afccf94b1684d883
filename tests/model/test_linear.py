"""A backward pass in two halves gives what a whole one gives, and keeps only what the second half needs."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients, Linear, PassOptions, columns
from hpcllm.model.loss import cross_entropy_sum
from tests.model.variants import VARIANTS, random_tokens, whole


def linear(x: torch.Tensor, layer: Linear, later: DeferredGradients | None) -> torch.Tensor:
    (y,) = columns(x, [layer.weights], PassOptions(deferred=later))
    return y


def gradients(model, later: DeferredGradients | None) -> tuple[torch.nn.Module, torch.Tensor]:
    """The decoder after one backward pass, the second half of which is left in `later`; and its loss."""
    decoder = build(model, whole(model), seed=0)
    tokens = random_tokens(model, 3, 11)
    loss = cross_entropy_sum(decoder(tokens, later), tokens)
    loss.backward()
    return decoder, loss.detach()


@pytest.mark.parametrize("name", VARIANTS)
def test_both_halves_make_the_whole_and_the_first_leaves_linear_layers_alone(name):
    model, later, told = VARIANTS[name], DeferredGradients(), []
    want, want_loss = gradients(model, None)
    split, loss = gradients(model, later)
    assert loss == want_loss
    linear = {f"{prefix}.{kind}" for prefix, module in split.named_modules() if isinstance(module, Linear)
              for kind, _ in module.named_parameters()}  # fmt: skip
    assert {key for key, p in split.named_parameters() if p.grad is None} == linear
    later.add(told.append)
    names = {p: key for key, p in split.named_parameters()}
    told = [names[p] for p in told]
    assert sorted(told) == sorted(linear | ({"embedding.weight"} if model.tied else set()))
    wanted = {key: q.grad for key, q in want.named_parameters()}
    for key, p in split.named_parameters():
        # a key's bias shifts all scores of a query alike, which softmax ignores: its gradient is 0 but for rounding
        size = wanted[key.replace("key.bias", "query.bias")].abs().max().item()
        torch.testing.assert_close(p.grad, wanted[key], rtol=1e-5, atol=1e-5 * size, msg=key)


def test_what_is_added_a_second_time_is_added_to_the_first():
    layer = Linear(5, 7)
    once, twice = [], []
    for times, found in [(1, once), (2, twice)]:
        layer.zero_grad()
        for _ in range(times):
            later, x = DeferredGradients(), torch.ones(2, 3, 5, requires_grad=True)
            linear(x, layer, later).square().sum().backward()
            later.add(lambda _: None)
        found += [layer.weight.grad.clone(), layer.bias.grad.clone(), x.grad]
    torch.testing.assert_close(twice, [2 * once[0], 2 * once[1], once[2]])


def test_the_first_half_frees_the_graph_and_the_second_the_rest():
    layer, later = Linear(5, 5), DeferredGradients()
    leaf = torch.randn(4, 5, requires_grad=True)
    x = leaf * 2
    memory = {"leaf": StorageWeakRef(leaf.untyped_storage()), "x": StorageWeakRef(x.untyped_storage())}
    linear(x, layer, later).sum().backward()
    del leaf, x
    assert memory["leaf"].expired()
    assert not memory["x"].expired()
    later.add(lambda _: None)
    assert memory["x"].expired()


def test_without_gradients_nothing_is_put_off():
    layer, later = Linear(5, 5), DeferredGradients()
    with torch.no_grad():
        linear(torch.randn(4, 5), layer, later)
    later.add(lambda _: pytest.fail("there is nothing to add"))
