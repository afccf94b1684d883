"""The loss is a sum over tokens, in nats and in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hpcllm.model import loss
from hpcllm.model.loss import IGNORED, cross_entropy_in_pieces, cross_entropy_sum
from hpcllm.model.loss import cross_entropy as nats_of


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 5), (4, 7, 33)])
def test_is_the_sum_of_log_probabilities_written_out(shape):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(shape, generator=generator)
    targets = torch.randint(shape[-1], shape[:2], generator=generator)
    log_probability = logits.double().log_softmax(-1)
    want = -sum(log_probability[b, t, targets[b, t]] for b in range(shape[0]) for t in range(shape[1]))
    torch.testing.assert_close(cross_entropy_sum(logits, targets).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_that_of_pytorch_for_any_scale_of_the_loss(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, 17, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(17, (3, 5), generator=generator)
    plain = 0.25 * cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    (want,) = torch.autograd.grad(plain, logits)
    (ours,) = torch.autograd.grad(0.25 * cross_entropy_sum(logits, targets), logits)
    assert ours.dtype == dtype
    assert ours.data_ptr() == logits.data_ptr()  # no tensor to spare
    torch.testing.assert_close(ours, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_second_backward_is_refused_not_wrong():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    nats = cross_entropy_sum(logits, torch.zeros(2, 3, dtype=torch.int64))
    nats.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        nats.backward()


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    nats = cross_entropy_sum(torch.zeros(2, 8, 100), torch.zeros(2, 8, dtype=torch.int64))
    assert nats.item() == pytest.approx(16 * math.log(100), rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(8, 512, 64, dtype=torch.bfloat16)
    nats = cross_entropy_sum(logits, torch.zeros(8, 512, dtype=torch.int64))
    assert nats.dtype == torch.float32
    assert nats.item() == pytest.approx(8 * 512 * math.log(64), rel=1e-5)


def test_batches_add_up():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 5, 9, generator=generator), torch.randint(9, (6, 5), generator=generator)
    parts = sum(cross_entropy_sum(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4))
    torch.testing.assert_close(parts, cross_entropy_sum(logits, targets), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strip", [1, 40, 10**9])
def test_strips_of_any_length_are_one_pass(monkeypatch, strip, dtype):
    """Also those of one token, and a last one that is shorter."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(3, 5, 17, generator=generator)).to(dtype)
    targets = torch.randint(17, (3, 5), generator=generator)
    found = []
    for size in (loss.STRIP_VALUES, strip):
        monkeypatch.setattr(loss, "STRIP_VALUES", size)
        own = logits.clone().requires_grad_()
        nats = cross_entropy_sum(own, targets)
        found += [nats.detach(), *torch.autograd.grad(nats, own)]
    rtol = 1e-6 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(found[:2], found[2:], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 17)])
def test_a_target_that_does_not_count_is_as_if_it_were_not_there(shape, share):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(shape, generator=generator, requires_grad=True)
    targets = torch.randint(shape[-1], shape[:2], generator=generator)
    counted = torch.rand(shape[:2], generator=generator) >= share
    alone = logits.detach()[counted].unsqueeze(0).requires_grad_()
    want = cross_entropy_sum(alone, targets[counted].unsqueeze(0))
    found = cross_entropy_sum(logits, targets.masked_fill(~counted, IGNORED))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    (3 * want).backward()
    (3 * found).backward()
    torch.testing.assert_close(logits.grad[counted], alone.grad[0], rtol=1e-6, atol=1e-7)
    assert torch.all(logits.grad[~counted] == 0)


@pytest.mark.parametrize("piece", [0, 1, 4, 99])
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 5, 17), (3, 8, 6)])
def test_each_token_has_a_weight_of_its_own_in_the_gradient(shape, piece):
    """As where the loss is made of sums over documents."""
    generator = torch.Generator().manual_seed(piece)
    x = torch.randn(*shape[:2], 8, generator=generator, requires_grad=True)
    head = torch.randn(shape[2], 8, generator=generator, requires_grad=True)
    targets = torch.randint(shape[2], shape[:2], generator=generator)
    targets[torch.rand(shape[:2], generator=generator) < 0.3] = IGNORED
    weights = torch.randn(shape[:2], generator=generator)
    found = cross_entropy_in_pieces(x, head, targets, piece) if piece else nats_of(x @ head.t(), targets)
    want = cross_entropy((x @ head.t()).flatten(0, 1), targets.flatten(), reduction="none").view(shape[:2])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad((weights * found).sum(), [x, head])
    torch.testing.assert_close(ours, torch.autograd.grad((weights * want).sum(), [x, head]), rtol=1e-4, atol=1e-5)


class NoHiddenWait(TorchDispatchMode):
    """Rejects operators that make the host wait for a device, some of them under deterministic algorithms alone."""

    WAITING = ("scatter", "index_put", "index_add", "index_copy", "nonzero", "unique", "masked_select", "_local_scalar")

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        is_unchecked = name == "_index_put_impl_" and args[4:] == (True,)  # whose indices nobody looks at
        assert is_unchecked or not any(word in name for word in self.WAITING), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("piece", [0, 4])
def test_no_operator_of_the_loss_waits_for_a_device(piece):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    weight = torch.randn(17, 8, generator=generator, requires_grad=True)
    targets = torch.randint(17, (2, 5), generator=generator)
    targets[0, 0] = IGNORED
    with NoHiddenWait():
        if piece:
            cross_entropy_in_pieces(x, weight, targets, piece).sum().backward()
        else:
            cross_entropy_sum(x @ weight.t(), targets).backward()
    assert x.grad is not None
    assert x.grad.any()
