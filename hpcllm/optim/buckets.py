"""Flat gradient buckets, summed over the replicas while the backward pass still runs.

    parameters in forward order    e0  w1  n1  w2  n2  w3      e, n: always exact (embeddings, norms, biases)
    coded buckets, last one first      [   1   ][   0   ]      w:    by the codec of gradients
    exact buckets                  [  2  : e0 n1 n2 ]          each a flat float32 tensor; p.grad is a view of it

Autograd adds every microbatch straight into the views. In the last microbatch's backward pass a hook counts the
parameters whose gradient is final; a complete bucket goes to the worker thread, in bucket order, so that all replicas
sum the same bucket at the same time. An embedding that first and last stage share comes last: it is summed over the
replicas, then over the two ends of the pipeline. Buckets of ranks on one node lie in memory that the node shares.
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
    missing: int = 0  # parameters whose gradient is not final yet


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
    _armed: bool = False

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def arm(self, step: int, exact: bool) -> None:
        """From here on a final gradient counts: call before the backward pass of the last microbatch."""
        self._armed, self._next, self._step, self._exact = True, 0, step, exact
        self._sum_s, self._exposed_s = 0.0, self.worker.exposed_s
        for bucket in self.buckets:
            bucket.missing = len(bucket.names)

    def finish(self) -> None:
        """Every gradient is summed when this returns. Collective over the mesh. Raises StallError."""
        assert self._next == len(self.buckets), "a parameter got no gradient"
        self._armed = False
        self.worker.finish()
        self.hidden_s += max(0.0, self._sum_s - (self.worker.exposed_s - self._exposed_s))

    def squared_norm(self, owns_shared: bool) -> float:
        """Sum of squares of this stage's gradients; a shared embedding counts on the end that owns it only."""
        counted = [bucket.gradients for bucket in self.buckets if owns_shared or not bucket.shared]
        return sum(float(torch.linalg.vector_norm(gradients)) ** 2 for gradients in counted)

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def ready(self, index: int) -> None:
        """One more gradient of a bucket is final; submit the buckets that this completes, in order."""
        if not self._armed:
            return
        self.buckets[index].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            self.worker.submit(partial(self._sum, bucket))

    def _sum(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        bucket.summation.run(bucket.gradients, self._step, self._exact)
        self._sum_s += time.perf_counter() - start


def make_buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    shared: str | None,
    plan: BucketPlan,
    replicas: Group,
    ends: Group,
    memory: Callable[[int], torch.Tensor] = torch.zeros,
) -> GradientBuckets:
    """Lay the gradients of `parameters` (in forward order) out in buckets and hook them up.

    shared: the parameter of which the other end of the pipeline has a copy, if there is one. memory: n -> (n,) float32
    of zeros; collective over replicas where it takes memory that a node shares.
    """
    buckets = []
    for number, names in enumerate(_groups(parameters, shared, plan)):
        gradients = _flatten((parameters[name] for name in names), memory)
        codec = "raw" if is_exact(names[0], plan.exact) else plan.codec
        over = (replicas, ends) if names == [shared] else (replicas,)
        summation = Summation(over, codec, plan.algorithm, (plan.seed, number))
        buckets.append(Bucket(names, gradients, summation, names == [shared]))
    result = GradientBuckets(buckets)
    for index, bucket in enumerate(buckets):
        for name in bucket.names:
            _on_final_gradient(parameters[name], partial(result.ready, index))
    return result


def _on_final_gradient(parameter: torch.nn.Parameter, call: Callable[[], None]) -> None:
    """Call after each backward pass that added to the parameter's .grad."""
    parameter.register_post_accumulate_grad_hook(lambda _: call())  # type: ignore[no-untyped-call]


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
