"""The loss of GRPO on texts whose rewards are known, arXiv:2402.03300, with one update a batch.

    advantage A of a text    r - mean of its group              ( / standard deviation, if so wanted)
    loss                     - A x ratio + kl x k3    a mean over the tokens of all texts of the step
    ratio                    exp(log p - log p of the weights that wrote it)
    k3                       exp(d) - d - 1, d = log p of the reference - log p

The weights that wrote a text are those of this pass: its own log-probabilities are the old ones, so the ratio is
exactly 1, and there is nothing to clip; the gradient is that of - A log p. What the sampler said of the same token is
compared with them: it computes in another order, with a cache.

The mean over tokens, not over texts: arXiv:2503.14476 section 3.3. k3 estimates the KL divergence from draws and is
never below 0: arXiv:2402.03300 equation 4. The entropy is estimated by the mean of - log p of the tokens drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIGURES = ("reward", "groups_without_signal", "length", "cut_share", "entropy", "kl", "sampler_difference")


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Criterion of a microbatch of texts; each tensor float32, (batch,) or (batch, sequence), on the device."""

    is_target: Tensor  # (batch, sequence): 1 where a token of the text is the target
    advantages: Tensor  # (batch,)
    figures: Tensor  # (batch, 4): what each text adds to the sums of the first four FIGURES
    sampled: Tensor  # (batch, sequence): nats by the sampler, where is_target
    reference: Tensor | None  # (batch, sequence): nats by the reference; None: not wanted
    kl: float
    largest: list[Tensor]  # gets the largest difference between sampler and this pass
    size: int = 1 + len(FIGURES)

    def __call__(self, nats: Tensor) -> Tensor:
        """Sum loss and FIGURES over the texts. nats: (batch, sequence) float32."""
        ratio = (nats.detach() - nats).exp()
        loss, now = -self.advantages.unsqueeze(1) * ratio, nats.detach()
        k3 = torch.zeros_like(now)
        if self.reference is not None:
            difference = nats - self.reference
            of_tokens = difference.exp() - difference - 1
            loss, k3 = loss + self.kl * of_tokens, of_tokens.detach()
        away = (now - self.sampled).abs() * self.is_target
        self.largest.append(away.max())
        of_tokens_sums = [(x * self.is_target).sum() for x in (now, k3, away)]
        return torch.stack([(loss * self.is_target).sum(), *self.figures.sum(0), *of_tokens_sums])


@dataclass
class Keep:
    """Criterion that keeps the nats."""

    nats: Tensor | None = None
    size: int = 1

    def __call__(self, nats: Tensor) -> Tensor:
        """Keep (batch, sequence) float32; return their sum."""
        self.nats = nats.detach()
        return nats.sum().unsqueeze(0)


def advantages(rewards: NDArray[np.float64], samples: int, scaled: bool) -> NDArray[np.float64]:
    """Return what each text has over the mean of its group. rewards: (texts,), groups of `samples` side by side.

    scaled: divided by the group's standard deviation; a group whose rewards are all alike has 0 either way.
    """
    groups = rewards.reshape(-1, samples)
    found: NDArray[np.float64] = groups - groups.mean(1, keepdims=True)
    alike = np.ptp(groups, axis=1, keepdims=True) == 0  # whose mean may be another number, by rounding
    found[np.broadcast_to(alike, found.shape)] = 0.0
    if scaled:
        found /= np.where(alike, 1.0, groups.std(1, keepdims=True))
    return found.reshape(-1)
