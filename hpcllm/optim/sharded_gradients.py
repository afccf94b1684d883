"""Gradients of which a rank keeps its share only: each microbatch's are reduce-scattered (ZeRO-2, arXiv:1910.02054).

    backward pass     w3 ----> w2 ----> w1                microbatch 1: w3 ----> w2 ----> ...
                       |        |
    a free buffer    [ w3     w2 ]--reduce-scatter--> + own range of the float32 sum
                                                 `--> the buffer is free again

Memory is taken when a first gradient of a flat buffer comes, and sent off as soon as each of its parameters has brought
something; what came twice meanwhile is added up, and what is left at the end of a step is sent then. Sums are linear,
so it does not matter which microbatch travels when, as long as all replicas send at the same points of the program:
they run the same schedule, and autograd goes through equal graphs in equal order. Sums over tp and over the ends of the
pipeline come last, of the share alone: other stages are at other points, and to wait for one of them could be for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from hpcllm.collectives.worker import Worker
from hpcllm.optim.gradient_reduce import EXACT_STEP, WRONG_COUNT, ReduceStep, squares, take_gradient
from hpcllm.optim.shard_spec import ShardSpec

MOST_SENDING = 2  # buffers on their way; more would take memory, and time only if the wire is the slower one anyway


@dataclass
class ShardedBucket:
    """One flat buffer's share, and the addends that are still to be sent."""

    spec: ShardSpec
    share: Tensor  # (owned,) float32
    memory: Tensor | None = None  # at least (buffer.size,) float32, while something is in it
    came: dict[str, int] = field(default_factory=dict)  # how many times each parameter added to the memory
    parts: int = 0  # sent off in this step
    additions: int = 0  # in this step


@dataclass
class ShardedGradients:
    """This rank's share of the gradients. See buckets.Gradients."""

    buckets: list[ShardedBucket]
    worker: Worker
    _step: ReduceStep = EXACT_STEP
    _home: dict[Tensor, tuple[ShardedBucket, str, slice]] = field(default_factory=dict)  # by parameter: name, its place
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0))  # (longest share,) float32, the worker's
    _free: list[Tensor] = field(default_factory=list)
    _sending: deque[tuple[Tensor, Future[None]]] = field(default_factory=deque)

    @property
    def shares(self) -> list[Tensor]:
        return [bucket.share for bucket in self.buckets]

    def begin(self, step: int, exact: bool) -> None:
        self._step = ReduceStep(step, exact)
        torch._foreach_zero_(self.shares)
        for bucket in self.buckets:
            bucket.parts = bucket.additions = 0

    def added(self, parameter: Tensor) -> None:
        """Move the gradient to the bucket's memory; submit that once every parameter has brought something."""
        bucket, name, place = self._home[parameter]
        if bucket.memory is None:
            bucket.memory = self._take(bucket.spec.buffer.size)
        view, gradient = bucket.memory[place], take_gradient(parameter).view(-1)
        if name in bucket.came:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        bucket.came[name] = bucket.came.get(name, 0) + 1
        bucket.additions += 1
        if len(bucket.came) == len(bucket.spec.buffer.names):
            self._send(bucket)

    def finish(self) -> None:
        for bucket in self.buckets:
            assert bucket.additions == bucket.spec.additions, WRONG_COUNT
            if bucket.memory is not None:
                self._send(bucket)
        for bucket in self.buckets:
            reduce = bucket.spec.reduce
            if reduce.others:
                self.worker.submit(partial(reduce.allreduce, bucket.share, reduce.others, self._step))
        self.worker.finish()
        self._free += [memory for memory, _ in self._sending]
        self._sending.clear()

    def squared_norm(self) -> Tensor:
        return squares([bucket.share for bucket in self.buckets if bucket.spec.counts], self._scratch)

    def is_finite(self) -> bool:
        return math.isfinite(squares(self.shares, self._scratch))

    def hook_up(self, bucket: ShardedBucket, parameters: Mapping[str, nn.Parameter]) -> None:
        """Lead what autograd adds to the bucket's parameters into it."""
        buffer, start = bucket.spec.buffer, 0
        for name, size in zip(buffer.names, buffer.sizes, strict=True):
            self._home[parameters[name]] = bucket, name, slice(start, start + size)
            parameters[name].register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]
            start += size

    def _take(self, n: int) -> Tensor:
        """Memory of n values at least; the allocator is only asked while the pool grows."""
        while self._sending and (len(self._sending) > MOST_SENDING or self._sending[0][1].done()):
            memory, future = self._sending.popleft()
            self.worker.wait(future)
            self._free.append(memory)
        fitting = [place for place, memory in enumerate(self._free) if memory.numel() >= n]
        if not fitting:
            return self._scratch.new_empty(n)
        return self._free.pop(min(fitting, key=lambda place: self._free[place].numel()))

    def _send(self, bucket: ShardedBucket) -> None:
        """Submit what is in the bucket's memory."""
        assert bucket.memory is not None
        buffer = bucket.spec.buffer
        values = bucket.memory[: buffer.size]
        for name, view in zip(buffer.names, bucket.spec.views(values), strict=True):
            if name not in bucket.came:
                view.zero_()
        future = self.worker.submit(partial(self._sum, bucket, values, replace(self._step, part=bucket.parts)))
        self._sending.append((bucket.memory, future))
        bucket.parts += 1
        bucket.memory = None
        bucket.came.clear()

    def _sum(self, bucket: ShardedBucket, values: Tensor, step: ReduceStep) -> None:
        total = self._scratch[: bucket.spec.owned]
        bucket.spec.reduce.reduce_scatter(values, total, step)
        bucket.share.add_(total)


def make_sharded_gradients(
    specs: Sequence[ShardSpec], parameters: Mapping[str, nn.Parameter], worker: Worker
) -> ShardedGradients:
    """A bucket for each flat buffer, hooked up."""
    like = next(iter(parameters.values())).new_empty(0, dtype=torch.float32)
    result = ShardedGradients([ShardedBucket(spec, like.new_zeros(spec.owned)) for spec in specs], worker)
    result._scratch = like.new_empty(max((spec.owned for spec in specs), default=0))
    for bucket in result.buckets:
        result.hook_up(bucket, parameters)
    return result
