"""Flat gradient buckets, summed over the replicas while the backward pass still runs.

    parameters in forward order    p0  p1  p2  p3  p4  p5
    buckets, last one first        [     2    ][  1  ][ 0 ]   each a flat float32 tensor; p.grad is a view of it

Autograd adds every microbatch straight into the views. In the last microbatch's backward pass a hook counts the
parameters whose gradient is final; a complete bucket goes to the worker thread, in bucket order, so that all replicas
sum the same bucket at the same time. An embedding that first and last stage share comes last: it is summed over the
replicas, then over the two ends of the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from hpcllm.codecs import Codec
from hpcllm.collectives import allreduce, ring_scratch_bytes
from hpcllm.collectives.worker import Worker
from hpcllm.mesh import Mesh
from hpcllm.waiting import Waits


@dataclass
class Bucket:
    names: list[str]
    gradients: torch.Tensor  # (sum of sizes,) float32
    shared: bool  # the tied embedding, of which the other end of the pipeline has a copy
    missing: int = 0  # parameters whose gradient is not final yet


@dataclass
class GradientBuckets:
    """The gradients of one stage's parameters and their sum over dp, for a shared embedding over the ends too."""

    buckets: list[Bucket]
    mesh: Mesh
    codec: Codec
    algorithm: str
    waits: Waits
    worker: Worker = field(default_factory=Worker)
    sent_bytes: int = 0
    _scratch: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _next: int = 0
    _armed: bool = False

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def arm(self) -> None:
        """From here on a final gradient counts: call before the backward pass of the last microbatch."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.names)

    def finish(self) -> None:
        """Every gradient is summed when this returns. Collective over the mesh. Raises StallError."""
        assert self._next == len(self.buckets), "a parameter got no gradient"
        self._armed = False
        self.worker.finish()

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
        for comm in (self.mesh.dp, self.mesh.ends) if bucket.shared else (self.mesh.dp,):
            arguments = (self.codec, self.algorithm, self.waits, self._scratch)
            self.sent_bytes += allreduce(bucket.gradients, comm, *arguments)


def make_buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    shared: str | None,
    bucket_bytes: float,
    mesh: Mesh,
    codec: Codec,
    algorithm: str,
    waits: Waits,
) -> GradientBuckets:
    """Lay the gradients of `parameters` (in forward order) out in buckets of about bucket_bytes and hook them up.

    shared: the parameter of which the other end of the pipeline has a copy, if there is one.
    """
    groups = _group({name: p.numel() for name, p in parameters.items() if name != shared}, bucket_bytes / 4)
    if shared:
        groups.append([shared])
    buckets = [Bucket(names, _flatten(parameters[n] for n in names), names == [shared]) for names in groups]
    largest = max(bucket.gradients.numel() for bucket in buckets)
    scratch_bytes = max(ring_scratch_bytes(largest, comm.size, codec) for comm in (mesh.dp, mesh.ends))
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
    result = GradientBuckets(buckets, mesh, codec, algorithm, waits, _scratch=scratch)
    for index, bucket in enumerate(buckets):
        for name in bucket.names:
            _on_final_gradient(parameters[name], partial(result.ready, index))
    return result


def _on_final_gradient(parameter: torch.nn.Parameter, call: Callable[[], None]) -> None:
    """Call after each backward pass that added to the parameter's .grad."""
    parameter.register_post_accumulate_grad_hook(lambda _: call())  # type: ignore[no-untyped-call]


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


def _flatten(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """One flat tensor of zeros whose pieces become the parameters' .grad."""
    parameters = list(parameters)
    flat = torch.zeros(sum(p.numel() for p in parameters))
    for p, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
    return flat
