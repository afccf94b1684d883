"""Flat gradient buckets, summed over the replicas while the backward pass still runs.

    backward pass     w3 ---> w2 ---> n2 ---> w1 ---> n1 ---> e0
    bucket 0          [ w3      w2 ]--sum over dp-->
    bucket 1                          [ w1 ]--sum over dp-->
    bucket 2                  [ n2              n1      e0 ]--sum over dp-->       e, n: exact

Every microbatch is added to flat float32 arrays: by autograd itself where parameters are float32 too, their .grad
being views of the arrays; else by the hook that autograd calls, or that a W of the schedule calls later. The schedule
says how many additions a step makes, so the last one is known whatever its order; a bucket that is complete goes to the
worker thread, in bucket order, so that all replicas sum the same bucket at the same time. An embedding that two ranks
share comes last: it is summed over the replicas, then over the two ends of the pipeline.

Replicas that share the states of the optimizer (ZeRO-1, arXiv:1910.02054 section 5) reduce-scatter: each gets the sum
of its own stretch of a bucket, in the place of its own addends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from hpcllm.collectives.worker import Worker
from hpcllm.optim.sections import Section
from hpcllm.optim.summation import EXACTLY, Moment

Memory = Callable[[int], Tensor]  # n -> (n,) float32 of zeros


class Gradients(Protocol):
    """What a step does with gradients; buckets.py keeps them whole, passing.py this rank's share only."""

    def begin(self, step: int, exact: bool) -> None:
        """Begin a new step, whose gradients are zero so far; exact: they are summed without a codec."""

    def added(self, parameter: Tensor) -> None:
        """Something was added to the parameter's .grad."""

    def finish(self) -> None:
        """Every gradient is summed when this returns. Collective over the mesh. Raises StallError."""

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm: the sum over all ranks counts each gradient once. () float64.

        On the gradients' device, where it may still be under way.
        """

    def is_finite(self) -> bool:
        """Whether all gradients of this rank are, whoever counts them."""

    @property
    def shares(self) -> list[Tensor]:
        """Of each section: the sums that this rank updates weights with, (owned,) float32, always the same memory."""


@dataclass
class Bucket:
    section: Section
    gradients: Tensor  # (flat.size,) float32
    missing: int = 0  # additions, in this step

    @property
    def share(self) -> Tensor:
        return self.gradients[self.section.start : self.section.end]


@dataclass
class GradientBuckets:
    """The gradients of one rank's parameters, whole, and their sums. See Gradients."""

    buckets: list[Bucket]
    worker: Worker
    _moment: Moment = EXACTLY
    _next: int = 0
    _home: dict[Tensor, tuple[Bucket, Tensor]] = field(default_factory=dict)  # by parameter: and its view, float32
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0))  # (longest share,) float32, the worker's

    @property
    def shares(self) -> list[Tensor]:
        return [bucket.share for bucket in self.buckets]

    def begin(self, step: int, exact: bool) -> None:
        self._next, self._moment = 0, Moment(step, exact)
        torch._foreach_zero_([bucket.gradients for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.missing = bucket.section.additions

    def finish(self) -> None:
        assert not any(bucket.missing for bucket in self.buckets), "a parameter got more or fewer gradients than said"
        self.worker.finish()

    def squared_norm(self) -> Tensor:
        return squares([bucket.share for bucket in self.buckets if bucket.section.counts], self._scratch)

    def is_finite(self) -> bool:
        return math.isfinite(squares(self.shares, self._scratch))

    def added(self, parameter: Tensor) -> None:
        """Submit the buckets that this completes, in order."""
        bucket, view = self._home[parameter]
        if parameter.dtype != torch.float32:
            view.add_(taken_gradient(parameter))
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket.section.sharded or not bucket.section.summation.is_alone:
                self.worker.submit(partial(self._sum, bucket))

    def hook_up(self, bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> None:
        """Lead what autograd adds to the bucket's parameters into it."""
        for name, view in zip(bucket.section.flat.names, bucket.section.views(bucket.gradients), strict=True):
            parameter = parameters[name]
            self._home[parameter] = bucket, view.view(parameter.shape)
            if parameter.dtype == torch.float32:
                parameter.grad = view.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]

    def _sum(self, bucket: Bucket) -> None:
        summation = bucket.section.summation
        if not bucket.section.sharded:
            summation.everywhere(bucket.gradients, self._moment)
            return
        total = self._scratch[: bucket.section.owned]
        summation.shared_out(bucket.gradients, total, self._moment)
        summation.over_others(bucket.share.copy_(total), self._moment)


def make_buckets(
    sections: Sequence[Section], parameters: Mapping[str, nn.Parameter], worker: Worker, memory: Memory = torch.zeros
) -> GradientBuckets:
    """A bucket for each section, hooked up. memory: collective over the replicas if their node shares it."""
    result = GradientBuckets([Bucket(section, memory(section.flat.size)) for section in sections], worker)
    longest = max((section.owned for section in sections if section.sharded), default=0)
    result._scratch = next(iter(parameters.values())).new_empty(longest, dtype=torch.float32)
    for bucket in result.buckets:
        result.hook_up(bucket, parameters)
    return result


def squares(arrays: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of all squares, () float64 on the device of `like`, where the arrays are: a few kernels, and no wait."""
    values = [x for x in arrays if x.numel()]
    if not values:
        return like.new_zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(values)).double().square().sum()


def taken_gradient(parameter: Tensor) -> Tensor:
    """The parameter's .grad, which is gone from it: it has been, or will at once be, added to a sum."""
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    return gradient
