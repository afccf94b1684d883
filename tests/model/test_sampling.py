"""Laws of sampling that hold for any model: greedy limits, windows, seeds, refusals."""

from __future__ import annotations

import pytest
import torch

from hpcllm.errors import NonFiniteError, UserError
from hpcllm.model.attention import KeyValueCache
from hpcllm.model.initialisation import build
from hpcllm.model.sampling import TokenSampler, check_prompt, check_settings, generate, local_next_token
from tests.model.variants import VARIANTS, random_tokens, whole

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def decoder(request):
    model = build(request.param, whole(request.param), seed=2)
    with torch.no_grad():  # sharper than at the start of training, so that contexts differ in their answer
        for weight in model.parameters():
            if weight.dim() == 2:
                weight *= 20
    return model


def drawing(decoder, temperature, top_k=0, seed=0) -> TokenSampler:
    return TokenSampler(temperature, top_k, decoder.model.vocabulary, torch.Generator().manual_seed(seed))


def sample(decoder, new_tokens=30, temperature=1.0, top_k=0, seed=0, stops=(), prompt=PROMPT):
    check_settings(new_tokens, temperature, top_k)
    check_prompt(prompt, decoder.model.vocabulary)
    next_token = local_next_token(decoder, drawing(decoder, temperature, top_k, seed), len(prompt) + new_tokens)
    return list(generate(next_token, prompt, new_tokens, decoder.model.max_sequence, stops))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_said(value, temperature):
    logits = torch.tensor([0.0, value, 1.0])
    with pytest.raises(NonFiniteError, match="the logits of the next token are not finite"):
        TokenSampler(temperature, 0, 3, torch.Generator()).token(logits)


def test_cached_logits_are_those_of_a_whole_pass(decoder):
    """However the tokens are cut: each new piece sees those before it, and nothing else has changed."""
    model = decoder.model
    tokens = random_tokens(model, 2, model.max_sequence, seed=3)
    with torch.no_grad():
        whole = decoder(tokens)
        for cuts in ([1] * model.max_sequence, [5, 1, 1, 3, 7], [16, 1], [1, 16], [17]):
            shape = (2, model.max_sequence, model.key_value_heads, model.head_dim)
            cache = KeyValueCache(range(model.layers), shape, torch.empty(0))
            pieces = [decoder(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
            assert cache.length == model.max_sequence
            torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_a_read_token_costs_one_token(decoder):
    """What reaches the layers after the prompt is one token long, but where a full cache is read afresh."""
    lengths = []
    decoder.blocks["0"].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    sample(decoder, new_tokens=30)
    half, whole = decoder.model.max_sequence // 2, decoder.model.max_sequence
    full = [half, *[1] * (whole - half)]
    assert lengths == [len(PROMPT), *[1] * (whole - len(PROMPT)), *full, *full][:30]


def contexts(prompt, tokens, window):
    """What each token is drawn from: all that was read since the cache was last full."""
    start = max(0, len(prompt) - window)
    for end in range(len(prompt), len(prompt) + len(tokens)):
        if end - start > window:
            start = end - max(window // 2, 1)
        yield [*prompt, *tokens][start:end]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 5], ids=["short", "longer than the window"])
def test_temperature_zero_is_the_argmax_of_what_was_read(decoder, prompt):
    tokens = sample(decoder, new_tokens=40, temperature=0.0, prompt=prompt)  # the cache is full more than once
    assert len(tokens) == 40 > 2 * decoder.model.max_sequence
    for token, context in zip(tokens, contexts(prompt, tokens, decoder.model.max_sequence), strict=True):
        with torch.no_grad():
            assert token == decoder(torch.tensor([context]))[0, -1].argmax()


def test_any_window_goes_on():
    """Of a stand-in for a model: what is read never exceeds the window, is never empty and ends with the newest."""
    for window in range(1, 9):
        read = []

        def next_token(tokens, afresh, read=read):
            read[:] = tokens if afresh else [*read, *tokens]
            return read[-1] + 1

        for length in (1, window, window + 3):
            tokens = []
            for token in generate(next_token, list(range(length)), 30, window):
                assert 0 < len(read) <= window
                tokens.append(token)
            assert tokens == list(range(length, length + 30))


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
    for stops in ({free[10]}, {free[10], free[4]}, {free[10], -1}):
        end = min(map(free.index, stops & set(free)))
        assert sample(decoder, temperature=2.0, stops=stops) == free[:end]


def test_caller_keeps_its_prompt_and_gradients(decoder):
    prompt = list(PROMPT)
    sample(decoder, prompt=prompt)
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
    drawn, n = TokenSampler(temperature, top_k, 5, torch.Generator().manual_seed(0)), 4000
    counts = torch.bincount(torch.tensor([drawn.token(logits) for _ in range(n)]), minlength=5)
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
