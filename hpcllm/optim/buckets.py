"""Flat gradient buckets, summed over the replicas while the backward pass still runs.

    backward pass     w3 ---> w2 ---> n2 ---> w1 ---> n1 ---> e0
    bucket 0          [ w3      w2 ]--sum over dp-->
    bucket 1                          [ w1 ]--sum over dp-->
    bucket 2                  [ n2              n1      e0 ]--sum over dp-->       e, n: exact

Whole gradients (GradientBuckets): every microbatch is added to flat float32 arrays. Linear layers and lookups add
theirs there by themselves (model/gradient_sums.py), now or at a W of the schedule. Others, norms above all, come to
.grad: the first is moved by the hook that autograd calls; the next ones autograd itself adds where parameters are
float32 too, their .grad being views of the arrays by then. The schedule says how many additions a step makes, so the
last one is known whatever its order; a bucket that is complete goes to the worker thread, in bucket order, so that all
replicas sum the same bucket at the same time. An embedding that two ranks share comes last: it is summed over the
replicas, then over the two ends of the pipeline. Replicas that shard the states of the optimizer (ZeRO-1,
arXiv:1910.02054 section 5) reduce-scatter: each gets the sum of its own range of a bucket, in the place of its own
addends. Late sums (shard_spec.py) come the same way; the ranges of the others are gathered once all ranks know the norm
(weights.py).

A share only (ShardedGradients, ZeRO-2): each microbatch's gradients are reduce-scattered.

    backward pass     w3 ----> w2 ----> w1                microbatch 1: w3 ----> w2 ----> ...
                       |        |
    a free buffer    [ w3     w2 ]--reduce-scatter--> + own range of the float32 sum
                                                 `--> the buffer is free again

Memory is taken when a first gradient of a flat buffer comes, and sent off as soon as its parameters have brought what
one backward pass brings (a tied embedding two gradients, as head and as table); what came twice meanwhile is added up,
and what is left at the end of a step is sent then. Sums are linear, so it does not matter which microbatch travels
when, as long as all replicas send at the same points of the program: they run the same schedule, and autograd goes
through equal graphs in equal order. Sums over tp and over the ends of the pipeline come last, of the share alone: other
stages are at other points, and to wait for one of them could be for ever.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from hpcllm.collectives.worker import Worker
from hpcllm.optim.gradient_reduce import EXACT_STEP, ReduceStep, add_squares, squares
from hpcllm.optim.shard_spec import ShardSpec

Memory = Callable[[int], Tensor]  # n -> (n,) float32 of zeros
MOST_SENDING = 2  # buffers on their way; more would take memory, and time only if the wire is the slower one anyway
WRONG_COUNT = "a parameter got more or fewer gradients than said"


class Gradients(ABC):
    """Gradients of one rank during a step: kept whole (GradientBuckets) or as this rank's share (ShardedGradients).

    shares: sums that this rank updates weights with, (owned,) float32 for each buffer, always the same memory.
    """

    def __init__(self, shares: list[Tensor], parameters: Mapping[str, nn.Parameter], worker: Worker) -> None:
        self.shares, self.worker = shares, worker
        self._step = EXACT_STEP
        self._like = next(iter(parameters.values())).new_empty(0, dtype=torch.float32)
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]

    @abstractmethod
    def begin(self, step: int, exact: bool) -> None:
        """Begin a new step, whose gradients are zero so far; exact: they are summed without a codec."""

    @abstractmethod
    def total(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return the memory of a parameter's sum, and True if it has something, as GradientSums.total."""

    @abstractmethod
    def added(self, parameter: Tensor) -> None:
        """Take note that a gradient was added to what `total` gave, or to the parameter's .grad."""

    @abstractmethod
    def finish(self) -> None:
        """Return when every gradient is summed. Collective over the mesh. Raises StallError."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm: the sum over all ranks counts each gradient once. () float64.

        After `finish`. On the gradients' device, where it may still be under way.
        """

    def is_finite(self) -> bool:
        """True if all gradients of this rank are finite, whoever counts them."""
        return math.isfinite(squares(self.shares, self._like))


@dataclass
class Bucket:
    spec: ShardSpec
    gradients: Tensor  # (buffer.size,) float32
    missing: int = 0  # additions, in this step
    job: Future[None] | None = None  # its sum, in this step

    @property
    def share(self) -> Tensor:
        return self.gradients[self.spec.start : self.spec.end]

    @property
    def summed(self) -> Tensor:
        """The part that holds the sum when a step's passes are over."""
        start, end = self.spec.summed
        return self.gradients[start:end]


class GradientBuckets(Gradients):
    """The gradients of one rank's parameters, whole, and their sums."""

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        parameters: Mapping[str, nn.Parameter],
        worker: Worker,
        memory: Memory = torch.zeros,
    ) -> None:
        """Make a bucket for each flat buffer. memory: collective over the replicas if their node shares it."""
        self.buckets = [Bucket(spec, memory(spec.buffer.size)) for spec in specs]
        self._next = 0
        self._home: dict[Tensor, tuple[Bucket, Tensor]] = {}  # by parameter: and its view, float32
        self._begun: set[Tensor] = set()  # parameters whose view has something of this step
        for bucket in self.buckets:
            for name, view in zip(bucket.spec.buffer.names, bucket.spec.views(bucket.gradients), strict=True):
                parameter = parameters[name]
                self._home[parameter] = bucket, view.view(parameter.shape)
                if parameter.dtype == torch.float32:
                    parameter.grad = view.view(parameter.shape)
        super().__init__([bucket.share for bucket in self.buckets], parameters, worker)
        self._norms: list[Tensor] = []  # () of each sum that counts

    def begin(self, step: int, exact: bool) -> None:
        """Begin a new step. Arrays are not touched yet: late sums of the step before may still arrive in them."""
        self._next, self._step = 0, ReduceStep(step, exact)
        self._begun.clear()
        for parameter, (bucket, _) in self._home.items():
            parameter.grad = None
            bucket.missing, bucket.job = bucket.spec.additions, None

    def total(self, parameter: Tensor) -> tuple[Tensor, bool]:
        return self._home[parameter][1], parameter in self._begun

    def added(self, parameter: Tensor) -> None:
        """Submit the buckets that this gradient completes, in order."""
        bucket, view = self._home[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            self._move(parameter, view)
        self._begun.add(parameter)
        if parameter.dtype == torch.float32:
            parameter.grad = view  # what autograd has more of it will add there
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket.spec.sharded or not bucket.spec.reduce.is_alone:
                bucket.job = self.worker.submit(partial(self._sum, bucket))

    def _move(self, parameter: Tensor, view: Tensor) -> None:
        """Take the .grad of a parameter into its view.

        To copy the first is three passes over memory; zeros that autograd adds it to would be five.
        """
        gradient = _take_gradient(parameter)
        if parameter in self._begun:
            view.add_(gradient)
        else:
            view.copy_(gradient)

    def finish(self) -> None:
        assert not any(bucket.missing for bucket in self.buckets), WRONG_COUNT
        self._norms.clear()
        for bucket in self.buckets:
            if bucket.job:
                self.worker.wait(bucket.job)
            if bucket.spec.counts and bucket.summed.numel():  # while the next sum is under way
                self._norms.append(torch.linalg.vector_norm(bucket.summed))
        self.worker.finish()

    def squared_norm(self) -> Tensor:
        return add_squares(self._norms, self._like)

    def _sum(self, bucket: Bucket) -> None:
        reduce = bucket.spec.reduce
        if not (bucket.spec.sharded or bucket.spec.late):
            reduce.allreduce(bucket.gradients, reduce.groups, self._step)
            return
        reduce.reduce_scatter(bucket.gradients, bucket.summed, self._step)
        reduce.allreduce(bucket.summed, reduce.others, self._step)

    def gather(self, number: int) -> Future[None]:
        """Start to bring in what the other replicas have summed of bucket `number`, late. Collective over them."""
        bucket = self.buckets[number]
        job = partial(bucket.spec.reduce.gather, bucket.gradients, bucket.summed, self._step)
        return self.worker.submit(job)


@dataclass
class ShardedBucket:
    """One flat buffer's share, and the addends that are still to be sent."""

    spec: ShardSpec
    share: Tensor  # (owned,) float32
    memory: Tensor | None = None  # at least (buffer.size,) float32, while something is in it
    came: dict[str, int] = field(default_factory=dict)  # how many times each parameter added to the memory
    parts: int = 0  # sent off in this step
    additions: int = 0  # in this step

    @property
    def is_full(self) -> bool:
        """True if the memory has what one backward pass brings, of each parameter something."""
        everyone = len(self.came) == len(self.spec.buffer.names)
        return everyone and sum(self.came.values()) * self.spec.passes >= self.spec.additions


class ShardedGradients(Gradients):
    """This rank's share of the gradients."""

    def __init__(self, specs: Sequence[ShardSpec], parameters: Mapping[str, nn.Parameter], worker: Worker) -> None:
        like = next(iter(parameters.values())).new_empty(0, dtype=torch.float32)
        self.buckets = [ShardedBucket(spec, like.new_zeros(spec.owned)) for spec in specs]
        self._home: dict[Tensor, tuple[ShardedBucket, str, slice]] = {}  # by parameter: name, its place
        for bucket in self.buckets:
            start = 0
            for name, size in zip(bucket.spec.buffer.names, bucket.spec.buffer.sizes, strict=True):
                self._home[parameters[name]] = bucket, name, slice(start, start + size)
                start += size
        self._free: list[Tensor] = []
        self._sending: deque[tuple[Tensor, Future[None]]] = deque()
        super().__init__([bucket.share for bucket in self.buckets], parameters, worker)
        self._counted = [bucket.share for bucket in self.buckets if bucket.spec.counts]
        self._scratch = like.new_empty(max((spec.owned for spec in specs), default=0))  # the worker's

    def begin(self, step: int, exact: bool) -> None:
        self._step = ReduceStep(step, exact)
        for bucket in self.buckets:
            bucket.parts = bucket.additions = 0

    def total(self, parameter: Tensor) -> tuple[Tensor, bool]:
        bucket, name, place = self._home[parameter]
        if bucket.memory is None:
            bucket.memory = self._take(bucket.spec.buffer.size)
        return bucket.memory[place].view(parameter.shape), name in bucket.came

    def added(self, parameter: Tensor) -> None:
        """Move what is in .grad to the bucket's memory; submit that once it is full."""
        bucket, name, _ = self._home[parameter]
        if parameter.grad is not None:
            total, begun = self.total(parameter)
            if begun:
                total.add_(_take_gradient(parameter))
            else:
                total.copy_(_take_gradient(parameter))
        bucket.came[name] = bucket.came.get(name, 0) + 1
        bucket.additions += 1
        if bucket.is_full:
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
        return squares(self._counted, self._like)

    def _take(self, n: int) -> Tensor:
        """Memory of n values at least; the allocator is only asked while the pool grows."""
        while self._sending and (len(self._sending) > MOST_SENDING or self._sending[0][1].done()):
            memory, future = self._sending.popleft()
            self.worker.wait(future)
            self._free.append(memory)
        fitting = [place for place, memory in enumerate(self._free) if memory.numel() >= n]
        if not fitting:
            return self._like.new_empty(n)
        return self._free.pop(min(fitting, key=lambda place: self._free[place].numel()))

    def _send(self, bucket: ShardedBucket) -> None:
        """Submit what is in the bucket's memory."""
        assert bucket.memory is not None
        values = bucket.memory[: bucket.spec.buffer.size]
        for name, view in zip(bucket.spec.buffer.names, bucket.spec.views(values), strict=True):
            if name not in bucket.came:
                view.zero_()
        future = self.worker.submit(partial(self._sum, bucket, values, replace(self._step, part=bucket.parts)))
        self._sending.append((bucket.memory, future))
        bucket.parts += 1
        bucket.memory = None
        bucket.came.clear()

    def _sum(self, bucket: ShardedBucket, values: Tensor, step: ReduceStep) -> None:
        is_first = step.part == 0  # of the step: what the share has is of the step before
        total = bucket.share if is_first else self._scratch[: bucket.spec.owned]
        bucket.spec.reduce.reduce_scatter(values, total, step)
        if not is_first:
            bucket.share.add_(total)


def _take_gradient(parameter: Tensor) -> Tensor:
    """Take the .grad away from a parameter: it will at once be added to a sum."""
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    return gradient
