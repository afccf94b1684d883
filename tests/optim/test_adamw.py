"""Our groups make PyTorch's AdamW decay matrices and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hpcllm.config import OptimizerConfig
from hpcllm.model.initialisation import build
from hpcllm.optim.adamw import make_adamw, moments, set_learning_rate, set_step
from tests.model.variants import VARIANTS, random_tokens, whole

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-6)


def step(decoder, adamw, number: int) -> None:
    adamw.zero_grad()
    decoder(random_tokens(decoder.model, 2, 9, seed=number)).square().mean().backward()
    set_learning_rate(adamw, CONFIG.learning_rate / (1 + number))
    adamw.step()


@pytest.mark.parametrize("name", VARIANTS)
def test_five_steps_are_the_algorithm_written_out(name):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, in float64."""
    model = VARIANTS[name]
    decoder = build(model, whole(model), seed=1)
    adamw = make_adamw(dict(decoder.named_parameters()), CONFIG)
    want = {key: p.detach().double() for key, p in decoder.named_parameters()}
    first, second = ({key: torch.zeros_like(p) for key, p in want.items()} for _ in range(2))
    for number in range(5):
        step(decoder, adamw, number)
        rate, t = CONFIG.learning_rate / (1 + number), number + 1
        for key, p in decoder.named_parameters():
            g = p.grad.double()
            first[key] = CONFIG.beta1 * first[key] + (1 - CONFIG.beta1) * g
            second[key] = CONFIG.beta2 * second[key] + (1 - CONFIG.beta2) * g * g
            mean, square = first[key] / (1 - CONFIG.beta1**t), second[key] / (1 - CONFIG.beta2**t)
            decay = CONFIG.weight_decay if p.dim() > 1 else 0.0
            want[key] = want[key] - rate * (mean / (square.sqrt() + CONFIG.epsilon) + decay * want[key])
    for key, p in decoder.named_parameters():
        torch.testing.assert_close(p.detach().double(), want[key], rtol=1e-5, atol=1e-6)


def test_without_gradient_matrices_shrink_and_vectors_stay():
    model = VARIANTS["gated with biases"]
    decoder = build(model, whole(model), seed=1)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    adamw = make_adamw(dict(decoder.named_parameters()), CONFIG)
    for p in decoder.parameters():
        p.grad = torch.zeros_like(p)
    adamw.step()
    shrink = 1 - CONFIG.learning_rate * CONFIG.weight_decay
    for name, p in decoder.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (shrink if p.dim() > 1 else 1.0), rtol=1e-6, atol=0)


def test_a_state_taken_out_and_put_back_goes_on_to_the_bit():
    model = VARIANTS["llama"]
    straight, other = (build(model, whole(model), seed=1) for _ in range(2))
    first, second = (make_adamw(dict(d.named_parameters()), CONFIG) for d in (straight, other))
    for number in range(3):
        step(straight, first, number)
    with torch.no_grad():
        for p, q in zip(other.parameters(), straight.parameters(), strict=True):
            p.copy_(q)
    for key in ("exp_avg", "exp_avg_sq"):
        mine, theirs = (moments(a, dict(d.named_parameters()), key) for a, d in ((second, other), (first, straight)))
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
    set_step(second, 3)
    step(straight, first, 3)
    step(other, second, 3)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), straight.parameters(), strict=True))


def test_the_state_is_there_before_the_first_step_and_every_parameter_is_in_one_group():
    model = VARIANTS["gpt2"]
    decoder = build(model, whole(model), seed=1)
    parameters = dict(decoder.named_parameters())
    adamw = make_adamw(parameters, dataclasses.replace(CONFIG, weight_decay=0.0))
    grouped = [p for group in adamw.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, parameters.values()))
    for key in ("exp_avg", "exp_avg_sq"):
        assert {n: t.shape for n, t in moments(adamw, parameters, key).items()} == {
            n: p.shape for n, p in parameters.items()
        }
