"""A decoder with fused kernels is the same model: loss and gradients, however they are made; fewer bytes are moved."""

from __future__ import annotations

import pytest
import torch
from counting import Counting
from emulated import EMULATOR, why_not
from variants import VARIANTS, random_tokens, stirred, whole

from hpcllm.codecs.gpu.launch import LAUNCHERS, launcher_of
from hpcllm.model.gpu import fused
from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.loss import cross_entropy_sum

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class CountingLauncher(Counting):
    """A Launcher too, whose launches count as PyTorch's do."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def launch(self, program, kernel, groups, arguments):
        self.kernels += 1
        again = kernel == "gradient"  # which writes what it reads
        self.count([*arguments, *arguments[:again]])
        EMULATOR.launch(program, kernel, groups, arguments)


@pytest.fixture
def launcher(monkeypatch):
    counting = CountingLauncher()
    monkeypatch.setitem(LAUNCHERS, "cpu", lambda: counting)
    launcher_of.cache_clear()
    yield counting
    launcher_of.cache_clear()


def plain(monkeypatch):
    monkeypatch.delitem(LAUNCHERS, "cpu")
    launcher_of.cache_clear()


def passes(decoder, split=False):
    """(loss, gradient of each parameter) of a forward and a backward pass."""
    deferred = DeferredGradients() if split else None
    tokens = random_tokens(decoder.model, 2, 9)
    loss = decoder.nats(decoder.hidden_states(tokens[:, :-1], deferred), tokens[:, 1:], deferred).sum()
    loss.backward()
    if deferred is not None:
        deferred.add(lambda _: None)
    return loss.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


WAYS = [("grouped, tied", *way) for way in (("selective", 0, False), ("full", 5, False), ("none", 0, True))]


@pytest.mark.parametrize(
    ("name", "recompute", "loss_tokens", "split"), [*((name, "none", 0, False) for name in VARIANTS), *WAYS]
)
def test_loss_and_gradients_are_those_of_pytorchs_operations(
    launcher, monkeypatch, name, recompute, loss_tokens, split
):
    decoders = [stirred(build(VARIANTS[name], whole(VARIANTS[name]), seed=0)) for _ in range(2)]
    for decoder in decoders:
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
    loss, gradients = passes(decoders[0], split)
    assert launcher.kernels
    plain(monkeypatch)
    want_loss, want = passes(decoders[1], split)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    for parameter, gradient in gradients.items():
        atol = 1e-6 + 1e-4 * float(want[parameter].abs().max())  # the gradient of a key's bias is 0 but for rounding
        torch.testing.assert_close(gradient, want[parameter], rtol=1e-4, atol=atol)


def bytes_a_logit(counting, tokens, vocabulary):
    logits = torch.randn(tokens, vocabulary).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    with counting:
        torch.autograd.grad(cross_entropy_sum(logits, targets), logits)
    return counting.moved_bytes / (tokens * vocabulary)


def test_the_loss_moves_six_bytes_a_logit_in_place_of_forty(launcher, monkeypatch):
    assert bytes_a_logit(launcher, 16, 4096) <= 6.2
    plain(monkeypatch)
    assert bytes_a_logit(Counting(), 16, 4096) >= 36


def norm_backward(counting, rows, width, dtype, has_sum):
    """(launches, bytes a value) of the backward pass of an RMSNorm, all of which are kernels of ours."""
    x, branch = (torch.randn(rows, width, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.ones(width, dtype=dtype, requires_grad=True)
    results = fused.added_rms_norm(x, branch, weight, 1e-5) if has_sum else (fused.rms_norm(x, weight, 1e-5),)
    upstream = [torch.randn_like(y) for y in results]
    kernels, launches, moved = counting.kernels, counting.launches, counting.moved_bytes
    with counting:
        torch.autograd.grad(results, [x, weight], upstream)
    assert counting.launches - launches == counting.kernels - kernels
    return counting.kernels - kernels, (counting.moved_bytes - moved) / (rows * width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_sum", [False, True])
def test_a_norms_backward_pass_reads_its_operands_once(launcher, monkeypatch, dtype, has_sum):
    """And a byte a value for the parts of the weight's gradient; of wider rows twice. A weight: 1 of 256 values."""
    e, once = dtype.itemsize, 3 + has_sum
    launches, moved = norm_backward(launcher, 256, 128, dtype, has_sum)
    assert launches == 2
    assert once * e + 1 <= moved <= once * e + 1 + 3 * e / 256
    monkeypatch.setattr(fused, "MOST_COLUMNS", 0)
    launches, moved = norm_backward(launcher, 256, 128, dtype, has_sum)
    assert launches == 3
    assert (once + 2) * e <= moved <= (once + 2) * e + 0.25


@pytest.mark.parametrize("name", ["llama", "grouped, tied", "llama 3.1"])
def test_a_block_takes_fewer_launches_and_fewer_bytes(launcher, monkeypatch, name):
    decoder = build(VARIANTS[name], whole(VARIANTS[name]), seed=0, dtype=torch.bfloat16)
    with launcher:
        passes(decoder)
    plain(monkeypatch)
    before = Counting()
    with before:
        passes(decoder)
    assert launcher.launches < before.launches
    assert launcher.moved_bytes < before.moved_bytes
