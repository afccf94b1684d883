"""The loss is a sum over tokens, in nats and in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpcllm.model.loss import IGNORED, cross_entropy_sum


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
    (ours,) = torch.autograd.grad(0.25 * cross_entropy_sum(logits, targets), logits)
    plain = 0.25 * cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    (want,) = torch.autograd.grad(plain, logits)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_second_backward_is_refused_not_wrong():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(2, 3, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    loss = cross_entropy_sum(torch.zeros(2, 8, 100), torch.zeros(2, 8, dtype=torch.int64))
    assert loss.item() == pytest.approx(16 * math.log(100), rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(8, 512, 64, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, torch.zeros(8, 512, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(8 * 512 * math.log(64), rel=1e-5)


def test_batches_add_up():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 5, 9, generator=generator), torch.randint(9, (6, 5), generator=generator)
    parts = sum(cross_entropy_sum(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4))
    torch.testing.assert_close(parts, cross_entropy_sum(logits, targets), rtol=1e-6, atol=0)


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
