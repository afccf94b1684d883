"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2), by PyTorch's fused kernel: one pass over memory.

Decay is for matrices; norms and biases, the vectors, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpcllm.config import OptimizerConfig


def make_adamw(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of one stage's parameters, its state already there (zeros), so that it can be saved at step 0."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True
    )
    for p in parameters.values():
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        adamw.state[p] = state
    return adamw


def moments(
    adamw: torch.optim.AdamW, parameters: Mapping[str, torch.nn.Parameter], key: str
) -> dict[str, torch.Tensor]:
    """Name -> first ("exp_avg") or second ("exp_avg_sq") moment of the gradient; the tensors themselves."""
    return {name: adamw.state[p][key] for name, p in parameters.items()}


def set_step(adamw: torch.optim.AdamW, step: int) -> None:
    """How many updates the moments have seen; the bias correction follows from it."""
    for state in adamw.state.values():
        state["step"].fill_(step)


def set_learning_rate(adamw: torch.optim.AdamW, learning_rate: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = learning_rate
