"""However many ranks share the layers: the logits, loss and gradients of one, in the messages promised."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from mpi4py import MPI

from hpcllm import collectives
from hpcllm.collectives import group_of
from hpcllm.config.schema import ModelConfig
from hpcllm.model import eager, tensor_parallel
from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.loss import IGNORED, cross_entropy_sum
from hpcllm.model.shapes import shard_of, split_dim
from hpcllm.model.tensor_parallel import TensorParallel, has_partial_gradient
from hpcllm.model.transformer import Decoder
from hpcllm.mpi.wait import Waits
from tests.model.variants import VARIANTS, cached_logits, random_tokens, stirred, whole

BATCH, LENGTH, SCALE = 2, 12, 0.25
LIMIT_S = 60.0
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "iallreduce", "ireduce_scatter", "iallgather")
# sequence parallel, recomputation, loss_tokens, backward pass in two halves: each pair of choices occurs
HOW = [
    (False, "none", 0, False),
    (True, "none", 7, True),
    (False, "selective", 7, False),
    (True, "selective", 0, True),
    (False, "full", 0, True),
    (True, "full", 7, False),
    (False, "selective", 0, True),
    (True, "none", 0, False),
]


def sized(name: str, ranks: int) -> ModelConfig:
    """A variant with heads and channels for so many ranks; 61 tokens still do not divide evenly."""
    model = VARIANTS[name]
    channels = {"head_channels": model.head_dim, "ffn": 12 * ranks, "layers": 2}
    return dataclasses.replace(model, heads=6 * ranks, kv_heads=model.kv_heads * ranks, **channels)


def share(comm, sequence: bool, codec: str = "raw") -> TensorParallel:
    group = group_of(comm)
    group.wire.waits = Waits(LIMIT_S)  # as in training: then sums are ours, in the background or not
    return tensor_parallel.tensor_parallel(group, sequence, codec)


def samples(model: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = random_tokens(model, BATCH, LENGTH), random_tokens(model, BATCH, LENGTH, seed=1)
    targets[0, 3:5] = IGNORED
    return tokens, targets


def part(whole_tensor: torch.Tensor, name: str, tp: TensorParallel) -> torch.Tensor:
    start, shape = shard_of(name, tuple(whole_tensor.shape), tp.rank, tp.size)
    return whole_tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]


@functools.cache
def alone(model: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """The whole model with its gradients, its logits and loss."""
    decoder = stirred(build(model, whole(model), seed=3, dtype=dtype))
    tokens, targets = samples(model)
    logits = decoder(tokens)
    nats = cross_entropy_sum(logits.clone(), targets)
    (SCALE * nats).backward()
    return decoder, logits.detach(), nats.detach()


def shard(model: ModelConfig, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> Decoder:
    """This rank's part of the model that `alone` has."""
    decoder = build(model, whole(model), seed=3, tp=tp, dtype=dtype)
    weights = dict(alone(model, dtype)[0].named_parameters())
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(part(weights[name], name, tp))
    return decoder


def backward(decoder: Decoder, split: bool) -> torch.Tensor:
    """The loss, after all gradients were added."""
    tokens, targets = samples(decoder.model)
    later = DeferredGradients() if split else None
    nats = decoder.nats(decoder.hidden_states(tokens, later), targets, later).sum()
    (SCALE * nats).backward()
    if later:
        later.add(lambda _: None)
    return nats.detach()


def gradient(comm, name: str, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    found = weight.grad.float()
    if has_partial_gradient(name, tp):
        comm.Allreduce(MPI.IN_PLACE, found.numpy())
    return found


def check_gradients(comm, decoder: Decoder, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> None:
    want = {name: weight.grad.float() for name, weight in alone(decoder.model, dtype)[0].named_parameters()}
    # a key's bias has no effect on softmax: its gradient is rounding alone, so the whole norm bounds it
    noise = tolerance / 10 * torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
    for name, weight in decoder.named_parameters():
        found = gradient(comm, name, weight, decoder.tp)
        error = torch.linalg.vector_norm(found - part(want[name], name, decoder.tp))
        assert error <= max(tolerance * torch.linalg.vector_norm(want[name]), noise), name


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_one_rank_however_they_are_made(comm, name):
    model = sized(name, comm.size)
    for sequence, recompute, loss_tokens, split in HOW if comm.size < 3 else HOW[comm.size - 3 :: 2]:
        decoder = shard(model, share(comm, sequence))
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
        loss_sum = backward(decoder, split).item()
        assert loss_sum == pytest.approx(alone(model)[2].item(), rel=1e-5)
        assert comm.allgather(loss_sum) == [loss_sum] * comm.size
        check_gradients(comm, decoder)
        whole_gradients = {
            key: weight.grad.numpy().tobytes()
            for key, weight in decoder.named_parameters()
            if split_dim(key) is None and not has_partial_gradient(key, decoder.tp)
        }
        assert comm.allgather(whole_gradients) == [whole_gradients] * comm.size


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_one_rank_and_hidden_states_the_same_bits_on_all(comm, name, sequence):
    model = sized(name, comm.size)
    decoder = shard(model, share(comm, sequence))
    tokens, _ = samples(model)
    with torch.no_grad():
        hidden = decoder.hidden_states(tokens)
        logits = torch.cat(comm.allgather(decoder.logits(hidden)), dim=-1)
    assert hidden.shape[1] * decoder.tp.parts == LENGTH
    torch.testing.assert_close(logits, alone(model)[1], rtol=1e-5, atol=1e-5)
    if not decoder.tp.sequence:
        assert all(torch.equal(hidden, theirs) for theirs in comm.allgather(hidden))


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "grouped, tied", "llama"])
def test_in_16_bits_gradients_are_those_of_one_rank_to_its_rounding(comm, name, dtype):
    """The bound is what 16 bits do to one rank, against float32."""
    model = sized(name, comm.size)
    lone = dict(alone(model, dtype)[0].named_parameters())
    exact = stirred(build(model, whole(model), seed=3))  # of the same weights, rounded
    with torch.no_grad():
        for key, weight in exact.named_parameters():
            weight.copy_(lone[key])
    want_loss = backward(exact, False).item()
    for sequence, recompute, loss_tokens, split in HOW[:4]:
        decoder = shard(model, share(comm, sequence), dtype)
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
        assert backward(decoder, split).item() == pytest.approx(want_loss, rel=1e-2)
        for key, weight in decoder.named_parameters():
            want, rounded = (dict(m.named_parameters())[key].grad.float() for m in (exact, alone(model, dtype)[0]))
            usual = torch.linalg.vector_norm(rounded - want) + 1e-3 * torch.linalg.vector_norm(want)
            error = torch.linalg.vector_norm(gradient(comm, key, weight, decoder.tp) - part(want, key, decoder.tp))
            assert weight.grad.dtype == dtype
            assert error <= 3 * usual, key


class Counted:
    """Stands before the collectives, and counts what is asked of them."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        for name in COLLECTIVES:
            monkeypatch.setattr(collectives, name, functools.partial(self._call, name, getattr(collectives, name)))

    def _call(self, name: str, function, *arguments, **options):
        self.calls.append(name.removeprefix("i"))
        return function(*arguments, **options)

    def taken(self) -> dict[str, int]:
        calls, self.calls = self.calls, []
        return {name: calls.count(name) for name in sorted(set(calls))}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("least_bytes", [0, 1 << 40], ids=["background", "blocking"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_a_block_costs_two_sums_forward_and_two_backward(comm, monkeypatch, name, sequence, least_bytes):
    """Split along the sequence a sum is a reduce-scatter and a gathering; x is gathered once more, not kept."""
    monkeypatch.setattr(tensor_parallel, "BACKGROUND_BYTES", least_bytes)
    counted = Counted(monkeypatch)
    model = sized(name, comm.size)
    decoder = shard(model, share(comm, sequence))
    decoder.span = dataclasses.replace(decoder.span, has_embedding=False)
    forward = {"allgather": 2, "reduce_scatter": 2} if sequence else {"allreduce": 2}
    backward = {"allgather": 4, "reduce_scatter": 2} if sequence else {"allreduce": 2}
    for decoder.recompute in ("none", "selective", "full"):
        x = torch.randn(BATCH, LENGTH // decoder.tp.parts, model.hidden, requires_grad=True)
        y = decoder.hidden_states(x)
        assert counted.taken() == {call: model.layers * n for call, n in forward.items()}
        y.sum().backward()
        again = forward if decoder.recompute == "full" else {}
        assert counted.taken() == {call: model.layers * (n + again.get(call, 0)) for call, n in backward.items()}


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_loss_sends_two_numbers_a_token_and_no_logits(comm, monkeypatch, sequence):
    gather, sent = collectives.allgather, []
    monkeypatch.setattr(collectives, "allgather", lambda x, *rest, **out: sent.append(x) or gather(x, *rest, **out))
    model = sized("llama", comm.size)
    decoder = shard(model, share(comm, sequence))
    tokens, targets = samples(model)
    for decoder.loss_tokens in (0, 5):
        hidden = decoder.hidden_states(tokens)
        sent.clear()
        decoder.nats(hidden, targets).sum()
        states = [hidden.numel()] if sequence else []
        assert [x.numel() for x in sent] == [*states, 2 * BATCH * LENGTH]


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize(("codec", "tolerance"), [("exp", 1e-5), ("zfp:16", 1e-2), ("int8", 0.1)])
def test_coded_activations_give_all_ranks_the_same_bits_near_those_of_one(comm, codec, tolerance):
    model = sized("llama", comm.size)
    for sequence in (False, True):
        decoder = shard(model, share(comm, sequence, codec))
        nats = backward(decoder, split=False).item()
        assert comm.allgather(nats) == [nats] * comm.size
        assert nats == pytest.approx(alone(model)[2].item(), rel=tolerance)
        check_gradients(comm, decoder, tolerance=tolerance)
        decoder.zero_grad()
        decoder.exact = True
        assert backward(decoder, split=False).item() == pytest.approx(alone(model)[2].item(), rel=1e-5)
        check_gradients(comm, decoder)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_gives_the_logits_of_the_whole_sequence(comm, name):
    model = sized(name, comm.size)
    decoder = shard(model, share(comm, sequence=False))
    tokens, _ = samples(model)
    pieces = cached_logits(decoder, tokens, [(0, 5), (5, 6), (6, 7), (7, 12)])
    logits = torch.cat(comm.allgather(pieces), dim=-1)
    torch.testing.assert_close(logits, alone(model)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parallel([2, 3, 4])
def test_a_large_sum_travels_behind_the_weight_gradients_with_the_same_bits(comm, monkeypatch):
    found = []
    for least_bytes in (0, 1 << 40):
        monkeypatch.setattr(tensor_parallel, "BACKGROUND_BYTES", least_bytes)
        for sequence in (False, True):
            decoder = shard(sized("gpt2", comm.size), share(comm, sequence))
            backward(decoder, split=False)
            found.append({name: weight.grad for name, weight in decoder.named_parameters()})
    for plain, background in zip(found[2:], found[:2], strict=True):
        assert all(torch.equal(plain[name], background[name]) for name in plain)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("sequence", [False, True])
def test_norms_run_again_only_where_asked(comm, monkeypatch, sequence):
    norm, calls = eager.rms_norm, []
    monkeypatch.setattr(eager, "rms_norm", lambda *given: calls.append(1) or norm(*given))
    model = sized("llama", comm.size)
    decoder = shard(model, share(comm, sequence))
    once = 2 * model.layers + 1
    for decoder.recompute, times in (("none", once), ("selective", 2 * once), ("full", 2 * once - 1)):
        calls.clear()
        backward(decoder, split=False)
        assert len(calls) == times
