"""AdamW on everything on one rank, by PyTorch in float64: what a split update has to equal, and what mistakes make.

gradients (steps, ranks, n) --> mean, or what a mistake takes for it --> clipped --> AdamW --> parameters (n,)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from hpcllm.config.schema import OptimizerConfig
from hpcllm.course.labs.zero.formula import faults, run

Values = NDArray[Any]
Ranges = Sequence[tuple[int, int]]  # of the ranks, in their order
LATE = 1e9  # steps after which the correction of the moments' bias is none


def mean(gradients: Values, _: Ranges) -> Values:
    """Return the mean over the ranks (n,)."""
    result: Values = gradients.mean(0)
    return result


def total(gradients: Values, _: Ranges) -> Values:
    """Return the sum over the ranks."""
    result: Values = gradients.sum(0)
    return result


def mean_of_mean(gradients: Values, _: Ranges) -> Values:
    """Return the mean, divided by the ranks once more."""
    result: Values = gradients.mean(0) / len(gradients)
    return result


def largest(gradients: Values, _: Ranges) -> Values:
    """Return the largest of each place."""
    result: Values = gradients.max(0)
    return result


def of_owner(gradients: Values, ranges: Ranges) -> Values:
    """Return of each range the gradients of its owner alone."""
    return np.concatenate([gradients[rank, a:b] for rank, (a, b) in enumerate(ranges)])


def norm_of_all(_: Values, gradient: Values, ranges: Ranges) -> Values:
    """Return the norm of the whole gradient, for each value (n,)."""
    return np.full(ranges[-1][1], np.linalg.norm(gradient))


def norm_of_range(_: Values, gradient: Values, ranges: Ranges) -> Values:
    """Return the norm of the range that a value lies in."""
    return np.concatenate([np.full(b - a, np.linalg.norm(gradient[a:b])) for a, b in ranges])


def norm_before(gradients: Values, _: Values, ranges: Ranges) -> Values:
    """Return the norm of the gradients that a range's owner had before the sum."""
    return np.concatenate([np.full(b - a, np.linalg.norm(gradients[r])) for r, (a, b) in enumerate(ranges)])


def norm_of_pieces(gradients: Values, _: Values, ranges: Ranges) -> Values:
    """Return the norm of the owners' own gradients in their ranges, before the sum."""
    return np.full(ranges[-1][1], np.linalg.norm(of_owner(gradients, ranges)))


def largest_norm(_: Values, gradient: Values, ranges: Ranges) -> Values:
    """Return the norm of the range that has the largest."""
    return np.full(ranges[-1][1], max(np.linalg.norm(gradient[a:b]) for a, b in ranges))


def norm_of_sum(gradients: Values, _: Values, ranges: Ranges) -> Values:
    """Return the norm of the sum over the ranks."""
    return np.full(ranges[-1][1], np.linalg.norm(gradients.sum(0)))


def norms_added(_: Values, gradient: Values, ranges: Ranges) -> Values:
    """Return the sum of the norms of all ranges."""
    return np.full(ranges[-1][1], sum(np.linalg.norm(gradient[a:b]) for a, b in ranges))


def squared(_: Values, gradient: Values, ranges: Ranges) -> Values:
    """Return the square of the norm."""
    return np.full(ranges[-1][1], np.linalg.norm(gradient) ** 2)


def no_norm(_: Values, __: Values, ranges: Ranges) -> Values:
    """Return a norm that never clips."""
    return np.full(ranges[-1][1], 1e-30)


class Whole:
    """Tensors with all their states, updated by PyTorch in place. Its functions, not its classes: those load much."""

    def __init__(self, tensors: list[Tensor], config: OptimizerConfig, decay: str = "adamw", steps: float = 0) -> None:
        self.tensors, self.config, self.decay = tensors, config, decay
        self.mean, self.mean_square = ([torch.zeros_like(t) for t in tensors] for _ in range(2))
        self.steps = [torch.tensor(steps) for _ in tensors]

    def step(self, gradients: list[Tensor]) -> None:
        """Make one step with gradients that are clipped already."""
        config = self.config
        (adam if self.decay == "coupled" else adamw)(
            self.tensors, gradients, self.mean, self.mean_square, [], self.steps, foreach=False, amsgrad=False,
            beta1=config.beta1, beta2=config.beta2, lr=config.learning_rate, eps=config.epsilon, maximize=False,
            weight_decay=0.0 if self.decay == "none" else config.weight_decay,
        )  # fmt: skip


@dataclass(frozen=True)
class Update:
    """A way of making updates: the right one, unless told otherwise."""

    combine: Callable[[Values, Ranges], Values] = mean
    norm: Callable[[Values, Values, Ranges], Values] = norm_of_all
    always: bool = False  # scaled to the norm where it is smaller, too
    clip: Callable[[Values, float, Values], Values] | None = None  # (gradient, clip_norm, norm) -> clipped
    decay: Literal["adamw", "coupled", "none"] = "adamw"
    corrects: bool = True

    def run(self, start: Values, gradients: Values, ranges: Ranges, config: OptimizerConfig) -> Values:
        """Return the parameters (n,) float64 after as many updates as there are gradients (steps, ranks, n)."""
        parameter = torch.from_numpy(start.astype(np.float64))
        whole = Whole([parameter], config, self.decay, 0.0 if self.corrects else LATE)
        for of_ranks in gradients.astype(np.float64):
            whole.step([torch.from_numpy(self._clipped(of_ranks, ranges, config.clip_norm))])
        return parameter.numpy()

    def _clipped(self, gradients: Values, ranges: Ranges, clip_norm: float) -> Values:
        gradient = self.combine(gradients, ranges)
        if self.clip:
            return self.clip(gradient, clip_norm, self.norm(gradients, gradient, ranges))
        factor = clip_norm / self.norm(gradients, gradient, ranges)
        result: Values = gradient * (factor if self.always else np.minimum(1, factor))
        return result


def faulty(start: Values, gradients: Values, ranges: Ranges, config: OptimizerConfig) -> Iterator[tuple[str, Values]]:
    """Yield the parameters that mistakes in the formula make of gradients (steps, ranks, n): key of the hint, (n,)."""
    each = gradients.astype(np.float64)
    raw = each.mean(1)
    clipped = np.stack([RIGHT._clipped(of_ranks, ranges, config.clip_norm) for of_ranks in each])
    for key, fault in faults():
        with np.errstate(all="ignore"):
            yield key, run(fault, start.astype(np.float64), raw, clipped, config)


RIGHT = Update()
MISTAKES = {  # key of the hint: what makes it
    "not_reduced": [Update(of_owner), Update(of_owner, norm_of_range)],
    "mean_twice": [Update(mean_of_mean)],
    "largest": [Update(largest), Update(lambda g, r: largest(g, r) / len(g))],
    "no_clip": [Update(norm=no_norm)],
    "local_norm": [Update(norm=norm_of_range), Update(norm=largest_norm)],
    "norm_before": [Update(norm=norm_before), Update(norm=norm_of_pieces)],
    "norm_of_sum": [Update(norm=norm_of_sum)],
    "norms_added": [Update(norm=norms_added), Update(norm=squared)],
    "sum": [Update(total), Update(total, norms_added)],
    "always_scaled": [Update(always=True)],
    "clip_values": [Update(clip=lambda g, most, _: np.clip(g, -most, most))],
    "clip_value": [Update(clip=lambda g, _, norm: g * np.minimum(1, 1 / norm))],
    "clip_turned": [
        Update(clip=lambda g, most, norm: g * np.maximum(1, norm / most)),
        Update(clip=lambda g, most, norm: g * np.maximum(1, most / norm)),
    ],
    "no_decay": [Update(decay="none")],
    "coupled_decay": [Update(decay="coupled")],
    "no_correction": [Update(corrects=False)],
}


@dataclass(frozen=True)
class Problem:
    """Parameters, gradients of some steps, settings: all ranks draw the same."""

    start: Values  # (n,) float32
    gradients: Values  # (steps, ranks, n) float32
    config: OptimizerConfig = field(default_factory=OptimizerConfig)


def draw(seed: int, n: int, ranks: int) -> Problem:
    """Draw parameters, and gradients in whole numbers times powers of two, which sum without rounding."""
    drawn = np.random.default_rng(seed)
    scales = np.array([1, 1 / 16, 4, 1 / 4], np.float32)  # steps that are clipped and steps that are not
    whole = drawn.integers(1, 10, (4, ranks, n)) * drawn.choice([-1, 1], (4, ranks, n))
    gradients = whole.astype(np.float32) * scales[:, None, None]
    config = OptimizerConfig(learning_rate=0.05, weight_decay=0.5, clip_norm=float(n) ** 0.5, epsilon=0.05)
    return Problem(drawn.standard_normal(n).astype(np.float32), gradients, config)
