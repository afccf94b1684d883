"""The decoder against its own table of parameters, its own pieces, and what causal attention promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hpcllm.model.attention import Angles, apply_rotary, rotary_table
from hpcllm.model.initialisation import allocate, build
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.shapes import parameter_shapes, split_layers
from hpcllm.model.transformer import Decoder
from tests.model.variants import VARIANTS, random_tokens, stirred, whole

pytestmark = pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_parameters_are_those_of_the_table_in_its_order(model, stages):
    for span in split_layers(model, stages):
        for decoder in Decoder(model, span), allocate(model, span):
            found = [(name, tuple(weight.shape)) for name, weight in decoder.named_parameters()]
            assert found == list(parameter_shapes(model, span).items())
            assert all(weight.device.type == "cpu" and weight.requires_grad for weight in decoder.parameters())
            assert list(decoder.state_dict()) == list(parameter_shapes(model, span))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_spans_in_sequence_are_the_whole_model_bit_for_bit(model, stages):
    tokens, targets = random_tokens(model, 3, 11), random_tokens(model, 3, 11, seed=1)
    one = stirred(build(model, whole(model), seed=3))
    logits = one(tokens)
    cross_entropy_sum(logits.clone(), targets).backward()

    parts = [stirred(build(model, span, seed=3)) for span in split_layers(model, stages)]
    x = tokens
    for part in parts:
        x = part(x)
    cross_entropy_sum(x.clone(), targets).backward()

    assert torch.equal(x, logits)
    sums: dict[str, torch.Tensor] = {}
    for part in parts:  # a tied embedding stands on both ends: its gradient is the sum
        for name, weight in part.named_parameters():
            sums[name] = sums[name] + weight.grad if name in sums else weight.grad
    wrong = [name for name, weight in one.named_parameters() if not torch.equal(weight.grad, sums[name])]
    assert not wrong


def test_a_token_sees_the_past_only(model):
    tokens = random_tokens(model, 2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.vocabulary
    decoder = stirred(build(model, whole(model), seed=0))
    with torch.no_grad():
        before, after = decoder(tokens), decoder(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all((before[:, t] - after[:, t]).abs().max() > 1e-4 for t in range(7, 12))


def test_order_of_the_past_matters(model):
    tokens = random_tokens(model, 1, 10)
    swapped = tokens[:, [1, 0, *range(2, 10)]]
    decoder = stirred(build(model, whole(model), seed=0))
    with torch.no_grad():
        assert (decoder(tokens)[:, -1] - decoder(swapped)[:, -1]).abs().max() > 1e-5


def test_attention_is_softmax_of_scores_written_out(model):
    decoder = stirred(build(model, whole(model), seed=0))
    attention, table = decoder.blocks["0"].attention, decoder.table
    x = torch.randn(2, 9, model.hidden, generator=torch.Generator().manual_seed(0))
    q, k, v = (part(x).view(2, 9, -1, model.head_dim) for part in (attention.query, attention.key, attention.value))
    if table is not None:
        q, k = apply_rotary(q, table[:, :9]), apply_rotary(k, table[:, :9])
    repeat = model.heads // model.key_value_heads
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / model.head_dim**0.5
    distance = torch.arange(9).unsqueeze(1) - torch.arange(9)
    scores = scores.masked_fill((distance < 0) | (distance >= (model.window or 9)), float("-inf"))
    want = attention.output(torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).flatten(2))
    angles = None if table is None else Angles(table[:, :9])
    torch.testing.assert_close(attention(x, angles), want, rtol=1e-5, atol=1e-6)


def test_rotary_scores_depend_on_distance_only_and_keep_length(model):
    model = dataclasses.replace(model, positions="rotary", max_sequence=200)
    table = rotary_table(model)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(model.head_dim, generator=generator).expand(1, 200, 1, -1) for _ in "qk")
    turned_q, turned_k = apply_rotary(q, table)[0, :, 0].double(), apply_rotary(k, table)[0, :, 0].double()
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, :, 0].double().norm(dim=-1), rtol=1e-6, atol=0)
    for distance in (0, 1, 5, 150):
        scores = (turned_q[distance:] * turned_k[: 200 - distance]).sum(-1)
        torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=0, atol=1e-5)
