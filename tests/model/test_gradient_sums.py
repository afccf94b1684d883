"""Gradients added straight to their sums are those of autograd, whatever lay there; each is one kernel, and no more."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import VARIANTS, random_tokens, stirred, whole

from hpcllm.model import gradient_sums
from hpcllm.model.gradient_sums import add_layer, add_product, add_rows
from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.chunk import additions

EPSILON = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6}  # of sums of rounded values
WAYS = [("none", 0, False), ("selective", 0, False), ("full", 5, False), ("none", 0, True), ("selective", 5, True)]


class Sums:
    """GradientSums whose memory is NaN until something is written; the hook of what autograd makes calls it too."""

    def __init__(self, parameters) -> None:
        self.totals = {p: torch.full_like(p, torch.nan, dtype=torch.float32).detach() for p in parameters}
        self.count: Counter = Counter()
        for p in parameters if isinstance(parameters, dict) else ():
            p.register_post_accumulate_grad_hook(self.added)

    def total(self, parameter):
        return self.totals[parameter], self.count[parameter] > 0

    def added(self, parameter):
        total, begun = self.total(parameter)
        if parameter.grad is not None:
            total.copy_(total + parameter.grad if begun else parameter.grad)
            parameter.grad = None
        self.count[parameter] += 1


def passes(decoder, microbatches, split):
    """Run forward and backward passes; returns the losses."""
    losses = []
    for m in range(microbatches):
        later = DeferredGradients() if split else None
        tokens = random_tokens(decoder.model, 2, 9, seed=m)
        loss = decoder.nats(decoder.hidden_states(tokens[:, :-1], later), tokens[:, 1:], later).sum()
        loss.backward()
        if later is not None:
            later.add(lambda _: None)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", EPSILON, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("recompute", "loss_tokens", "split"), WAYS)
@pytest.mark.parametrize("name", VARIANTS)
def test_sums_of_microbatches_are_those_of_autograd(name, recompute, loss_tokens, split, dtype):
    model = VARIANTS[name]
    plain, ours = (stirred(build(model, whole(model), seed=0, dtype=dtype)) for _ in range(2))
    for decoder in (plain, ours):
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
    ours.gradient_sums = sums = Sums(dict.fromkeys(ours.parameters()))
    want = passes(plain.float(), 3, False)
    assert passes(ours, 3, split) == pytest.approx(want, rel=EPSILON[dtype])
    backward = [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT] if split else [Op.BACKWARD]
    told = additions([ours], [Action(op, m) for m in range(3) for op in backward])
    noise = EPSILON[dtype] * torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    for (key, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert sums.count[p] == told[key], key
        error = torch.linalg.vector_norm(sums.totals[p] - q.grad)
        assert error <= 8 * EPSILON[dtype] * torch.linalg.vector_norm(q.grad) + noise, key


def test_without_gradients_nothing_is_added():
    model = VARIANTS["llama"]
    decoder = build(model, whole(model), seed=0)
    decoder.gradient_sums = sums = Sums(dict.fromkeys(decoder.parameters()))
    with torch.no_grad():
        decoder(random_tokens(model, 2, 9))
    assert not sums.count


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16), ("meta", torch.float16)]
)
def test_a_weight_gradient_is_one_kernel_that_writes_its_sum_and_later_reads_it_too(monkeypatch, device, dtype, bias):
    """The meta device has products of 16 bit with a float32 result, as CUDA has: the same calls, without a value."""
    tokens, inputs, outputs = 6, 5, 7
    weight, offset = (torch.zeros(shape, dtype=dtype, device=device) for shape in ((outputs, inputs), (outputs,)))
    x, gradient = (torch.ones(tokens, n, dtype=dtype, device=device) for n in (inputs, outputs))
    sums, moved = Sums([weight, offset]), []
    monkeypatch.setattr(gradient_sums, "has_wide_products", lambda *_: True)
    for _ in range(3):
        with Counting() as counting:
            add_layer(sums, weight, offset if bias else None, x, gradient)
        moved.append(counting.moved_bytes - x.nbytes - gradient.nbytes)
        assert counting.launches == 1 if not bias else counting.launches <= 3
    if not bias:
        assert moved == [4 * inputs * outputs, 8 * inputs * outputs, 8 * inputs * outputs]
    if device == "cpu":
        assert torch.equal(sums.totals[weight], torch.full((outputs, inputs), 18.0))
        assert not bias or torch.equal(sums.totals[offset], torch.full((outputs,), 18.0))


@settings(max_examples=30, deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 40)] * 3), seed=st.integers(0, 2**32), dtype=st.sampled_from(list(EPSILON)))
def test_products_overwrite_what_is_no_number_and_add_to_what_is_one(sizes, seed, dtype):
    m, n, k = sizes
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    total, truth = torch.full((m, n), torch.nan), left.double() @ right.double()
    size = left.double().abs() @ right.double().abs()
    for count in (1, 2):
        add_product(total, left, right, begun=count > 1)
        assert ((total - count * truth).abs() <= count * EPSILON[dtype] * size).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(0, 50), dtype=st.sampled_from(list(EPSILON)))
def test_rows_that_come_several_times_are_added_up(seed, n, dtype):
    generator = torch.Generator().manual_seed(seed)
    rows, values = torch.randint(7, (n,), generator=generator), torch.randn(n, 3, generator=generator).to(dtype)
    total = torch.ones(7, 3)
    add_rows(total, rows, values)
    want = torch.ones(7, 3, dtype=torch.float64)
    for row, value in zip(rows.tolist(), values.double(), strict=True):
        want[row] += value
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)


def test_a_product_is_tried_once_and_must_be_right(monkeypatch):
    tried = gradient_sums.has_wide_products.__wrapped__
    assert not tried("cpu", torch.bfloat16)  # which has none
    results = {"right": 17.0, "not added": 16.0, "nothing": 1.0}
    for what, value in results.items():
        monkeypatch.setattr(torch, "addmm", lambda total, *_, value=value, **__: total.fill_(value))
        assert tried("cpu", torch.bfloat16) == (what == "right")
    gradient_sums.has_wide_products("cpu", torch.float16)
    with Counting() as counting:
        gradient_sums.has_wide_products("cpu", torch.float16)
    assert counting.launches == 0
