"""Laws of sampling that hold for any model: greedy limits, windows, seeds, refusals."""

from __future__ import annotations

import pytest
import torch

from hpcllm.errors import UserError
from hpcllm.model.initialisation import build
from hpcllm.model.sampling import draw, generate
from tests.model.variants import VARIANTS, whole

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def decoder(request):
    model = build(request.param, whole(request.param), seed=2)
    with torch.no_grad():  # sharper than at the start of training, so that contexts differ in their answer
        for weight in model.parameters():
            if weight.dim() == 2:
                weight *= 20
    return model


def sample(decoder, new_tokens=30, temperature=1.0, top_k=0, seed=0, stop=None, prompt=PROMPT):
    generator = torch.Generator().manual_seed(seed)
    return list(generate(decoder, prompt, new_tokens, temperature, top_k, generator, stop))


def test_temperature_zero_is_the_argmax_of_the_window(decoder):
    tokens, window = list(PROMPT), decoder.model.max_sequence
    for token in sample(decoder, temperature=0.0):  # 30 new tokens: the window slides
        with torch.no_grad():
            assert token == decoder(torch.tensor([tokens[-window:]]))[0, -1].argmax()
        tokens.append(token)
    assert len(tokens) == len(PROMPT) + 30 > window


def test_one_candidate_and_a_tiny_temperature_are_the_argmax(decoder):
    greedy = sample(decoder, temperature=0.0)
    assert sample(decoder, top_k=1) == greedy
    assert sample(decoder, temperature=1e-30) == greedy
    assert sample(decoder, temperature=1e-320) == greedy


def test_seed_repeats_and_another_differs(decoder):
    assert sample(decoder, temperature=2.0) == sample(decoder, temperature=2.0)
    assert sample(decoder, temperature=2.0) != sample(decoder, temperature=2.0, seed=1)


def test_stop_ends_before_it_is_yielded(decoder):
    free = sample(decoder, temperature=2.0)
    stop = free[10]
    assert sample(decoder, temperature=2.0, stop=stop) == free[: free.index(stop)]


def test_caller_keeps_its_prompt_and_gradients(decoder):
    prompt = list(PROMPT)
    next(generate(decoder, prompt, 5, 0.0, 0, torch.Generator(), None))
    assert prompt == PROMPT
    assert torch.ones(1, requires_grad=True).exp().requires_grad


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 3, 100])
def test_frequencies_are_those_of_the_tempered_softmax(temperature, top_k):
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    scaled = logits / temperature
    if top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(top_k, 5)).values[-1], float("-inf"))
    want = scaled.softmax(-1)
    generator, n = torch.Generator().manual_seed(0), 4000
    counts = torch.bincount(torch.tensor([draw(logits, temperature, top_k, generator) for _ in range(n)]), minlength=5)
    assert ((counts / n - want).abs() <= 5 * (want * (1 - want) / n).sqrt()).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [1, 61]}, "token 61 .* 0 to 60"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"new_tokens": -1}, "new_tokens = -1"),
    ],
)
def test_refusals_name_the_value(decoder, wrong, says):
    with pytest.raises(UserError, match=says):
        sample(decoder, **wrong)
