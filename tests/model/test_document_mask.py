"""Documents packed into rows compute what each of them computes alone, on every split of a layer."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.model.attention import causal_attention
from hpcllm.model.documents import Documents, Grouped, Masked
from hpcllm.model.initialisation import build
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.tensor_parallel import has_partial_gradient
from tests.model.test_tensor_parallel import HOW, part, sized
from tests.model.test_tensor_parallel import share as tp_share
from tests.model.variants import VARIANTS, random_tokens, stirred, whole

ROWS = [[5, 1, 6], [12], [3, 4, 5], [2, 2, 8]]  # lengths of the documents of each row
SCALE = 0.25


def packed() -> Documents:
    lengths = np.array(list(itertools.chain(*ROWS)))
    places = torch.cat([torch.arange(int(length)) for length in lengths])
    return Documents(lengths, places.view(len(ROWS), -1))


@functools.cache
def alone(model):
    """The whole model, its logits of each document by itself, and its gradients of their losses."""
    decoder = stirred(build(model, whole(model), seed=3))
    tokens, targets = (random_tokens(model, len(ROWS), 12, seed).flatten() for seed in (0, 1))
    logits, lengths = [], packed().lengths.tolist()
    for x, y in zip(tokens.split(lengths), targets.split(lengths), strict=True):
        logits.append(decoder(x.unsqueeze(0)))
        (SCALE * cross_entropy_sum(logits[-1].clone(), y.unsqueeze(0))).backward()
    return decoder, torch.cat(logits, dim=1).detach().view(len(ROWS), 12, -1)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_give_the_logits_and_gradients_of_each_alone(comm, name):
    model = sized(name, comm.size)
    whole_decoder, want = alone(model)
    tokens, targets = (random_tokens(model, len(ROWS), 12, seed) for seed in (0, 1))
    for sequence, recompute, loss_tokens, split in HOW if comm.size < 3 else HOW[comm.size - 3 :: 2]:
        decoder = build(model, whole(model), seed=3, tp=tp_share(comm, sequence))
        with torch.no_grad():
            for key, weight in whole_decoder.named_parameters():
                dict(decoder.named_parameters())[key].copy_(part(weight, key, decoder.tp))
        decoder.recompute, decoder.loss_tokens = recompute, loss_tokens
        later = DeferredGradients() if split else None
        hidden = decoder.hidden_states(tokens, later, documents=packed())
        with torch.no_grad():
            logits = torch.cat(comm.allgather(decoder.logits(hidden)), dim=-1)
        assert (logits - want).abs().max() <= 1e-5 * want.abs().max()
        (SCALE * decoder.nats(hidden, targets, later)).sum().backward()
        if later:
            later.add(lambda _: None)
        check_gradients(comm, decoder, whole_decoder)


def check_gradients(comm, decoder, whole_decoder):
    grads = {key: weight.grad for key, weight in whole_decoder.named_parameters()}
    noise = 1e-6 * torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]))
    for key, weight in decoder.named_parameters():
        found = weight.grad
        if has_partial_gradient(key, decoder.tp):
            found = sum(comm.allgather(found))
        want = part(grads[key], key, decoder.tp)
        error = torch.linalg.vector_norm(found - want)
        assert error <= max(1e-5 * torch.linalg.vector_norm(want), noise), key


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=30), st.sampled_from([0, 1, 7]), st.sampled_from([(4, 2), (3, 3)])
)
def test_groups_and_mask_are_one_attention(lengths, window, heads):
    """One row of all documents, so lengths need not add up to anything."""
    sizes, total = np.array(lengths), sum(lengths)
    places = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(1, total, n, 8, generator=generator).requires_grad_() for n in (heads[0], heads[1], heads[1])
    )
    upstream = torch.randn(q.shape, generator=generator)
    results = []
    for plan in Grouped.of(sizes), Masked.of(places, window, torch.float32):
        out = plan.attend(causal_attention, q, k, v, window)
        results.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for grouped, masked in zip(*results, strict=True):
        torch.testing.assert_close(grouped, masked, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_groups_cost_what_is_attended_not_the_square_of_the_row(lengths):
    plan = Grouped.of(np.array(lengths))
    slots, tokens = plan.tokens_of_slots, plan.slots_of_tokens
    assert torch.equal(slots[tokens], torch.arange(sum(lengths)))  # each token has a slot of its own
    pairs = sum(documents * length**2 for documents, length in plan.groups)
    assert pairs <= sum(max(32, length) ** 2 / 0.75**2 for length in lengths)
    assert len(plan.groups) <= 2 + np.log(400 / 32) / np.log(4 / 3)
