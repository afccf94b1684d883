"""Flat gradient buckets, summed over the replicas while the backward pass still runs.

    parameters in forward order    e0  w1  n1  w2  n2  w3      e, n: always exact (embeddings, norms, biases)
    coded buckets, last one first      [   1   ][   0   ]      w:    by the codec of gradients
    exact buckets                  [  2  : e0 n1 n2 ]          each a flat float32 tensor; p.grad is a view of it

Every microbatch is added straight into the views: by autograd, which calls a hook, or later by a W of the schedule,
which says so. The schedule says how many additions a step makes, so the last one is known whatever its order; a
bucket that is complete goes to the worker thread, in bucket order, so that all replicas sum the same bucket at the same
time. An embedding that two ranks share comes last: it is summed over the replicas, then over the two ends of the
pipeline. Buckets of ranks on one node lie in memory that the node shares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from hpcllm.collectives import Group
from hpcllm.collectives.worker import Worker
from hpcllm.optim.summation import Summation
from hpcllm.policy import is_exact


@dataclass
class Bucket:
    names: list[str]
    gradients: torch.Tensor  # (sum of sizes,) float32
    summation: Summation
    shared: bool  # the tied embedding, of which the other end of the pipeline has a copy
    additions: int  # that a step makes to these gradients
    missing: int = 0  # of them, in this step


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """What decides the buckets of a stage; equal on all replicas of it."""

    bucket_bytes: float
    codec: str  # of gradients that may be coded
    exact: str  # words that make a parameter's gradient exact
    algorithm: str
    seed: int


@dataclass
class GradientBuckets:
    """The gradients of one stage's parameters and their sum over dp, for a shared embedding over the ends too."""

    buckets: list[Bucket]
    worker: Worker = field(default_factory=Worker)
    hidden_s: float = 0.0  # seconds of sums behind which the backward pass ran
    _sum_s: float = 0.0  # of this step's sums
    _exposed_s: float = 0.0  # the worker's when the step began
    _step: int = 0
    _exact: bool = False
    _next: int = 0
    _home: dict[torch.Tensor, Bucket] = field(default_factory=dict)  # by parameter

    def begin(self, step: int, exact: bool) -> None:
        """Set the gradients to zero for a new step; exact: they are summed without a codec."""
        self._next, self._step, self._exact = 0, step, exact
        self._sum_s, self._exposed_s = 0.0, self.worker.exposed_s
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.missing = bucket.additions

    def finish(self) -> None:
        """Every gradient is summed when this returns. Collective over the mesh. Raises StallError."""
        assert not any(bucket.missing for bucket in self.buckets), "a parameter got more or fewer gradients than said"
        self.worker.finish()
        self.hidden_s += max(0.0, self._sum_s - (self.worker.exposed_s - self._exposed_s))

    def squared_norm(self, owns_shared: bool) -> float:
        """Sum of squares of this stage's gradients; a shared embedding counts on the end that owns it only."""
        counted = [bucket.gradients for bucket in self.buckets if owns_shared or not bucket.shared]
        return sum(float(torch.linalg.vector_norm(gradients)) ** 2 for gradients in counted)

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def added(self, parameter: torch.Tensor) -> None:
        """A microbatch was added to the parameter's .grad; submit the buckets that this completes, in order."""
        self._home[parameter].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            self.worker.submit(partial(self._sum, bucket))

    def hook_up(self, parameter: torch.nn.Parameter, bucket: Bucket) -> None:
        """Count autograd's additions to a parameter of the bucket."""
        self._home[parameter] = bucket
        parameter.register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]

    def _sum(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        bucket.summation.run(bucket.gradients, self._step, self._exact)
        self._sum_s += time.perf_counter() - start


def make_buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    additions: Mapping[str, int],
    shared: str | None,
    plan: BucketPlan,
    replicas: Group,
    ends: Group,
    memory: Callable[[int], torch.Tensor] = torch.zeros,
) -> GradientBuckets:
    """Lay the gradients of `parameters` (in forward order) out in buckets and hook them up.

    additions: how many times a step adds to a parameter's gradient, by name; the hook counts one a backward pass.
    shared: the parameter of which the other end of the pipeline has a copy, if there is one. memory: n -> (n,) float32
    of zeros; collective over replicas where it takes memory that a node shares.
    """
    result = GradientBuckets([])
    for number, names in enumerate(_groups(parameters, shared, plan)):
        gradients = _flatten((parameters[name] for name in names), memory)
        codec = "raw" if is_exact(names[0], plan.exact) else plan.codec
        over = (replicas, ends) if names == [shared] else (replicas,)
        summation = Summation(over, codec, plan.algorithm, (plan.seed, number))
        bucket = Bucket(names, gradients, summation, names == [shared], sum(additions[name] for name in names))
        result.buckets.append(bucket)
        for name in names:
            result.hook_up(parameters[name], bucket)
    return result


def _groups(parameters: Mapping[str, torch.nn.Parameter], shared: str | None, plan: BucketPlan) -> list[list[str]]:
    """Names of each bucket, in the order in which the backward pass completes the buckets; the shared one last."""
    sizes = {name: p.numel() for name, p in parameters.items() if name != shared}
    kinds = [{n: size for n, size in sizes.items() if is_exact(n, plan.exact) is exact} for exact in (False, True)]
    groups = [group for kind in kinds for group in _group(kind, plan.bucket_bytes / 4)]
    place = {name: number for number, name in enumerate(reversed(sizes))}
    groups.sort(key=lambda names: place[names[-1]])
    return [*groups, [shared]] if shared else groups


def _group(sizes: dict[str, int], bucket_values: float) -> list[list[str]]:
    """Names in backward order, cut where a group has reached bucket_values."""
    groups: list[list[str]] = []
    filled = math.inf
    for name in reversed(sizes):
        if filled >= bucket_values:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return groups


def _flatten(parameters: Iterable[torch.nn.Parameter], memory: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """One flat tensor of zeros whose pieces become the parameters' .grad."""
    parameters = list(parameters)
    flat = memory(sum(p.numel() for p in parameters))
    for p, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
    return flat
