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

Replicas that shard the states of the optimizer (ZeRO-1, arXiv:1910.02054 section 5) reduce-scatter: each gets the sum
of its own range of a bucket, in the place of its own addends.
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
from hpcllm.optim.gradient_reduce import EXACT_STEP, WRONG_COUNT, ReduceStep, squares, take_gradient
from hpcllm.optim.shard_spec import ShardSpec

Memory = Callable[[int], Tensor]  # n -> (n,) float32 of zeros


class Gradients(Protocol):
    """Gradients of one rank during a step: kept whole (GradientBuckets) or as this rank's share (ShardedGradients)."""

    def begin(self, step: int, exact: bool) -> None:
        """Begin a new step, whose gradients are zero so far; exact: they are summed without a codec."""

    def added(self, parameter: Tensor) -> None:
        """Take note that something was added to the parameter's .grad."""

    def finish(self) -> None:
        """Return when every gradient is summed. Collective over the mesh. Raises StallError."""

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm: the sum over all ranks counts each gradient once. () float64.

        On the gradients' device, where it may still be under way.
        """

    def is_finite(self) -> bool:
        """True if all gradients of this rank are finite, whoever counts them."""

    @property
    def shares(self) -> list[Tensor]:
        """Sums that this rank updates weights with, (owned,) float32 for each buffer, always the same memory."""


@dataclass
class Bucket:
    spec: ShardSpec
    gradients: Tensor  # (buffer.size,) float32
    missing: int = 0  # additions, in this step

    @property
    def share(self) -> Tensor:
        return self.gradients[self.spec.start : self.spec.end]


@dataclass
class GradientBuckets:
    """The gradients of one rank's parameters, whole, and their sums. See Gradients."""

    buckets: list[Bucket]
    worker: Worker
    _step: ReduceStep = EXACT_STEP
    _next: int = 0
    _home: dict[Tensor, tuple[Bucket, Tensor]] = field(default_factory=dict)  # by parameter: and its view, float32
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0))  # (longest share,) float32, the worker's

    @property
    def shares(self) -> list[Tensor]:
        return [bucket.share for bucket in self.buckets]

    def begin(self, step: int, exact: bool) -> None:
        self._next, self._step = 0, ReduceStep(step, exact)
        torch._foreach_zero_([bucket.gradients for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.missing = bucket.spec.additions

    def finish(self) -> None:
        assert not any(bucket.missing for bucket in self.buckets), WRONG_COUNT
        self.worker.finish()

    def squared_norm(self) -> Tensor:
        return squares([bucket.share for bucket in self.buckets if bucket.spec.counts], self._scratch)

    def is_finite(self) -> bool:
        return math.isfinite(squares(self.shares, self._scratch))

    def added(self, parameter: Tensor) -> None:
        """Submit the buckets that this gradient completes, in order."""
        bucket, view = self._home[parameter]
        if parameter.dtype != torch.float32:
            view.add_(take_gradient(parameter))
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket.spec.sharded or not bucket.spec.reduce.is_alone:
                self.worker.submit(partial(self._sum, bucket))

    def hook_up(self, bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> None:
        """Lead what autograd adds to the bucket's parameters into it."""
        for name, view in zip(bucket.spec.buffer.names, bucket.spec.views(bucket.gradients), strict=True):
            parameter = parameters[name]
            self._home[parameter] = bucket, view.view(parameter.shape)
            if parameter.dtype == torch.float32:
                parameter.grad = view.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]

    def _sum(self, bucket: Bucket) -> None:
        reduce = bucket.spec.reduce
        if not bucket.spec.sharded:
            reduce.allreduce(bucket.gradients, reduce.groups, self._step)
            return
        total = self._scratch[: bucket.spec.owned]
        reduce.reduce_scatter(bucket.gradients, total, self._step)
        reduce.allreduce(bucket.share.copy_(total), reduce.others, self._step)


def make_buckets(
    specs: Sequence[ShardSpec], parameters: Mapping[str, nn.Parameter], worker: Worker, memory: Memory = torch.zeros
) -> GradientBuckets:
    """A bucket for each flat buffer, hooked up. memory: collective over the replicas if their node shares it."""
    result = GradientBuckets([Bucket(spec, memory(spec.buffer.size)) for spec in specs], worker)
    longest = max((spec.owned for spec in specs if spec.sharded), default=0)
    result._scratch = next(iter(parameters.values())).new_empty(longest, dtype=torch.float32)
    for bucket in result.buckets:
        result.hook_up(bucket, parameters)
    return result
