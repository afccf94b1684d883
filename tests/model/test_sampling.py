"""Laws of sampling that hold for any logits: frequencies, greedy limits, seeds, what settings leave out, refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.errors import NonFiniteError, UserError
from hpcllm.model.sampling import Sampling, check_prompt, draw, seed_of, uniform

LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 2.9])
SETTINGS = {
    "all": Sampling(1.0, 0),
    "hot": Sampling(3.0, 0),
    "cold": Sampling(0.5, 0),
    "top k": Sampling(1.0, 3),
    "top p": Sampling(1.0, 0, top_p=0.7),
    "top k, then p": Sampling(0.7, 4, top_p=0.9),
    "min p": Sampling(1.0, 0, min_p=0.1),
    "all of them": Sampling(1.5, 5, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
}


def marks(count: int) -> list[float]:
    return [(place + 0.5) / count for place in range(count)]


def shares(logits: torch.Tensor, settings: Sampling, history=(), n: int = 2000) -> torch.Tensor:
    """Share of each token among draws whose numbers are spread evenly: exact to 1 / n a token."""
    drawn = draw(logits.expand(n, -1), settings, marks(n), [history] * n)
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / n


def wanted(logits: torch.Tensor, settings: Sampling, history=()) -> torch.Tensor:
    """Probabilities that transformers' processors leave."""
    scores = logits[None].clone()
    if history:
        penalty = transformers.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
        scores = penalty(torch.tensor([history]), scores)
    steps = [transformers.TemperatureLogitsWarper(settings.temperature)]
    steps += [transformers.TopKLogitsWarper(settings.top_k)] if settings.top_k else []
    steps += [transformers.TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
    steps += [transformers.MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    for step in steps:
        scores = step(None, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_frequencies_are_the_probabilities_that_transformers_leaves(name, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = LOGITS if seed == 0 else 2 * torch.randn(40, generator=generator)
    history = [3, 1, 3] if SETTINGS[name].repetition_penalty != 1 else []
    want = wanted(logits, SETTINGS[name], history)
    got = shares(logits, SETTINGS[name], history)
    assert ((got > 0) <= (want > 0)).all()
    torch.testing.assert_close(got, want, rtol=0, atol=1.5 / 2000)


@given(st.lists(st.integers(-400, 400), min_size=2, max_size=30, unique=True), st.data())
def test_a_token_does_not_depend_on_the_rows_beside_it(numbers, data):
    logits = torch.tensor(numbers) / 100
    settings = data.draw(st.sampled_from(list(SETTINGS.values())))
    rows = torch.stack([logits.roll(place) for place in range(len(numbers))])
    histories = [[place % len(numbers)] for place in range(len(rows))]
    together = draw(rows, settings, marks(len(rows)), histories)
    alone = [draw(rows[i : i + 1], settings, marks(len(rows))[i : i + 1], [histories[i]])[0] for i in range(len(rows))]
    assert together == alone


@pytest.mark.parametrize("settings", [Sampling(1.0, 1), Sampling(1e-30, 0), Sampling(1e-320, 50), Sampling(0.0),
                                      Sampling(1.0, 0, top_p=1e-9), Sampling(1.0, 0, min_p=1.0)])  # fmt: skip
def test_the_limits_of_all_settings_are_the_likeliest_token(settings):
    assert set(draw(LOGITS.expand(50, -1), settings, marks(50), [()] * 50)) == {3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_type_are_drawn_from(dtype):
    assert set(draw(LOGITS.to(dtype).expand(50, -1), Sampling(1.0, 2), marks(50), [()] * 50)) == {3, 5}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_said(value, temperature):
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, value, 1.0]])
    with pytest.raises(NonFiniteError, match="the logits of the next token are not finite"):
        draw(logits, Sampling(temperature, 0), [0.5, 0.5], [(), ()])


def test_numbers_of_seeds_are_spread_evenly_and_differ():
    found = [uniform(seed_of(0, step, prompt, sample), place)
             for step in range(5) for prompt in range(5) for sample in range(8) for place in range(10)]  # fmt: skip
    assert len(set(found)) == len(found) == 2000
    assert 0 < min(found) < max(found) < 1
    counts = torch.histc(torch.tensor(found), 10, 0, 1)
    assert ((counts - 200).abs() < 5 * (200 * 0.9) ** 0.5).all()
    assert len({seed_of(1, 23), seed_of(12, 3), seed_of(123), seed_of(1, 2, 3)}) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"min_p": 1.1}, "min_p = 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
    ],
)
def test_refusals_name_the_value(wrong, says):
    with pytest.raises(UserError, match=says):
        Sampling(**wrong).check()


@pytest.mark.parametrize(("prompt", "says"), [([], "no tokens"), ([1, 61], "token 61 .* 0 to 60")])
def test_a_prompt_that_cannot_be_read_is_rejected(prompt, says):
    with pytest.raises(UserError, match=says):
        check_prompt(prompt, 61)
