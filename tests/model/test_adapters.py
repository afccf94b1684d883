"""A model with low-rank adapters computes what the merged weights compute, and its gradients follow from theirs."""

from __future__ import annotations

import functools

import pytest
import torch
from mpi4py import MPI

from hpcllm.config.rules import LAYERS
from hpcllm.config.schema import AdapterConfig, ModelConfig
from hpcllm.model.initialisation import allocate, build, initial_values
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.shapes import adapter_shapes, is_adapter, parameter_shapes, shard_of, split_dim, trained_shapes
from hpcllm.model.tensor_parallel import TensorParallel, has_partial_gradient
from hpcllm.model.transformer import Decoder
from tests.model.test_tensor_parallel import part, share, sized
from tests.model.variants import VARIANTS, random_tokens, stirred, whole

ALL = AdapterConfig(rank=3, alpha=4.5)
SOME = AdapterConfig(rank=2, alpha=1.0, targets=("query", "down"))
# sequence parallel, recomputation, loss_tokens, backward pass in two halves
HOW = [(False, "none", 0, False), (True, "none", 7, True), (False, "selective", 7, True), (True, "full", 0, False)]
FAMILIES = ["gpt2", "grouped, tied", "neox", "qwen"]


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.3 * torch.randn(shape, generator=generator)


@functools.cache
def merged(model: ModelConfig, adapter: AdapterConfig) -> tuple[Decoder, Decoder, float]:
    """The base; and its weights + s b a, with the gradients of a loss, and the loss."""
    base, decoder = (stirred(build(model, whole(model), seed=3)) for _ in range(2))
    shapes = adapter_shapes(model, adapter)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            a, b = (name.replace(".weight", f".adapter_{kind}") for kind in "ab")
            if a in shapes:
                weight += adapter.alpha / adapter.rank * value(b, shapes[b]) @ value(a, shapes[a])
    return base, decoder, backward(decoder, False)


def adapted(model: ModelConfig, adapter: AdapterConfig, tp: TensorParallel) -> Decoder:
    """This rank's part of the base with adapters."""
    decoder = allocate(model, whole(model), tp, adapter=adapter)
    base, shapes = dict(merged(model, adapter)[0].named_parameters()), adapter_shapes(model, adapter)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(part(value(name, shapes[name]) if name in shapes else base[name], name, tp))
    return decoder


def backward(decoder: Decoder, split: bool) -> float:
    tokens, targets = (random_tokens(decoder.model, 2, 12, seed) for seed in (0, 1))
    later = DeferredGradients() if split else None
    loss = decoder.nats(decoder.hidden_states(tokens, later), targets, later).sum()
    (0.25 * loss).backward()
    if later:
        later.add(lambda _: None)
    return loss.item()


def want(name: str, model: ModelConfig, adapter: AdapterConfig) -> torch.Tensor:
    """d(w + s b a): s b^T dw and s dw a^T, with the merged weights' gradient dw."""
    layer, _, kind = name.rpartition(".")
    shapes, scale = adapter_shapes(model, adapter), adapter.alpha / adapter.rank
    gradient = dict(merged(model, adapter)[1].named_parameters())[f"{layer}.weight"].grad
    a, b = (value(f"{layer}.adapter_{kind}", shapes[f"{layer}.adapter_{kind}"]) for kind in "ab")
    return scale * (b.t() @ gradient if kind == "adapter_a" else gradient @ a.t())


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("adapter", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_are_those_of_the_merged_weights(comm, name, adapter):
    model = sized(name, comm.size)
    for sequence, recompute, loss_tokens, split in HOW:
        decoder = adapted(model, adapter, share(comm, sequence))
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
        assert backward(decoder, split) == pytest.approx(merged(model, adapter)[2], rel=1e-5)
        for key, weight in decoder.named_parameters():
            assert weight.requires_grad == is_adapter(key) == (weight.grad is not None), key
            if weight.grad is not None:
                found, exact = weight.grad, want(key, model, adapter)
                if has_partial_gradient(key, decoder.tp):
                    comm.Allreduce(MPI.IN_PLACE, found.numpy())
                error = torch.linalg.vector_norm(found - part(exact, key, decoder.tp))
                assert error <= 1e-5 * torch.linalg.vector_norm(exact) + 1e-6, key


@pytest.mark.parametrize("layers", [LAYERS, ("query", "down"), ("gate",)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_is_what_the_decoder_trains(name, layers):
    model, adapter = VARIANTS[name], AdapterConfig(rank=5, targets=layers)
    decoder = allocate(model, whole(model), adapter=adapter)
    trained = {key: tuple(p.shape) for key, p in decoder.named_parameters() if p.requires_grad}
    assert list(trained.items()) == list(adapter_shapes(model, adapter).items())
    frozen = {key: tuple(p.shape) for key, p in decoder.named_parameters() if not is_adapter(key)}
    assert frozen == parameter_shapes(model)
    plain = allocate(model, whole(model))
    assert trained_shapes(model, AdapterConfig()) == {key: tuple(p.shape) for key, p in plain.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_of_tp_begins_with_its_part_of_the_same_values_which_add_nothing(ranks):
    model, adapter = sized("qwen", ranks), ALL
    alone = initial_values(model, 7, adapter=adapter)
    for key, shape in adapter_shapes(model, adapter).items():
        whole_values, rest = torch.full(shape, torch.nan), []
        alone(key, whole_values)
        for rank in range(ranks):
            _, local = shard_of(key, shape, rank, ranks)
            values = torch.full(local, torch.nan)
            initial_values(model, 7, TensorParallel(rank=rank, size=ranks), adapter)(key, values)
            assert torch.equal(values, part(whole_values, key, TensorParallel(rank=rank, size=ranks)))
            rest.append(local)
        assert len(set(rest)) == 1
        assert (rest[0] == shape) == (split_dim(key) is None)
        if key.endswith("_b"):
            assert not whole_values.any()
        else:
            assert whole_values.std().item() == pytest.approx((3 * shape[1]) ** -0.5, rel=0.35)
