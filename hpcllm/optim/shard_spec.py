"""A flat buffer as one rank sees it: who its gradients are summed over, and which range of it this rank owns.

    shard = "none"     every replica owns all of it, and updates all of it
    else               dp = 3:  [ replica 0 | replica 1 | replica 2 ]

Both the gradients and the weights of the buffer's parameters are cut like this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcllm.collectives import Group, chunk_range
from hpcllm.config.policies import is_exact
from hpcllm.model.shapes import split_dim
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, has_partial_gradient
from hpcllm.model.unshard_hooks import unit_of
from hpcllm.optim.flat_buffers import FlatBuffer, Traits, lay_out
from hpcllm.optim.gradient_reduce import GradientReduce

CPU = torch.device("cpu")
Fill = Callable[[str, Tensor], None]  # writes the first values of a parameter, by its name, to memory of its shape


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Settings that decide the flat buffers of a stage; equal on all of its replicas."""

    bucket_bytes: float  # of gradients
    codec: str  # of gradients that may be coded
    exact: str  # words that make a parameter exact
    algorithm: str
    seed: int
    shard: str = "none"
    device: torch.device = CPU


@dataclass(frozen=True)
class Groups:
    """Ranks that a rank sums its gradients with; communicators of their own."""

    replicas: Group  # dp
    ends: Group  # both ends of the pipeline
    tensor: Group | None = None  # tp; None: this rank has no partial gradients


@dataclass(frozen=True)
class ShardSpec:
    """One flat buffer and this rank's part in it."""

    buffer: FlatBuffer
    sharded: bool
    start: int  # first value of the range that this rank owns
    end: int
    reduce: GradientReduce
    counts: bool  # in the norm; else another rank has the same gradients and counts them
    additions: int  # made to the gradients in a step, of all parameters together

    @property
    def owned(self) -> int:
        """Number of values that this rank owns."""
        return self.end - self.start

    def residuals(self) -> dict[str, Tensor]:
        """Residuals of error feedback of this buffer's sums, by what each belongs to: the memory itself."""
        found = self.reduce.residuals(self.buffer.size, self.owned if self.sharded else None)
        return {f"{', '.join(self.buffer.names)}: {what}": residual for what, residual in found.items()}

    def views(self, array: Tensor) -> list[Tensor]:
        """The parts of array (buffer.size,) that belong to each parameter."""
        return list(torch.split(array, list(self.buffer.sizes)))

    def flatten(self, parameters: Mapping[str, nn.Parameter], array: Tensor, fill: Fill) -> Tensor:
        """Make the buffer's parameters views of `array` (buffer.size,), filled; it is returned."""
        for name, view in zip(self.buffer.names, self.views(array), strict=True):
            parameter = parameters[name]
            parameter.data = view.view(parameter.shape)
            fill(name, parameter.data)
        return array


def make_shard_specs(
    parameters: Mapping[str, nn.Parameter],
    additions: Mapping[str, int],
    shared: str | None,
    plan: BucketPlan,
    groups: Groups,
    tp: TensorParallel = ALONE,
) -> list[ShardSpec]:
    """Flat buffers of `parameters`, given in forward order, in the order in which a backward pass completes them.

    additions: how many times a step adds to a parameter's gradient, by name. shared: the parameter of which the other
    end of the pipeline has a copy, if there is one.
    """

    def traits(name: str) -> Traits:
        unit = unit_of(name) if plan.shard == "all" else ""
        whole = tp.size == 1 or split_dim(name) is None
        return Traits(is_exact(name, plan.exact), whole, has_partial_gradient(name, tp), name == shared, unit)

    sizes = {name: p.numel() for name, p in parameters.items()}
    buffers = lay_out(sizes, traits, plan.bucket_bytes / 4)
    return [_shard_spec(buffer, number, additions, plan, groups, tp) for number, buffer in enumerate(buffers)]


def _shard_spec(
    buffer: FlatBuffer, number: int, additions: Mapping[str, int], plan: BucketPlan, groups: Groups, tp: TensorParallel
) -> ShardSpec:
    traits, replicas, sharded = buffer.traits, groups.replicas, plan.shard != "none"
    over_tp = (groups.tensor,) if traits.tp_partial and groups.tensor else ()
    over_ends = (groups.ends,) if traits.shared else ()
    codec = "raw" if traits.exact else plan.codec
    reduce = GradientReduce(replicas, over_tp + over_ends, codec, plan.algorithm, (plan.seed, number), plan.device)
    start, end = chunk_range(buffer.size, replicas.size, replicas.rank) if sharded else (0, buffer.size)
    is_first = (sharded or replicas.rank == 0) and (tp.rank == 0 or not traits.whole)
    counts = is_first and (groups.ends.rank == 0 or not traits.shared)
    return ShardSpec(buffer, sharded, start, end, reduce, counts, sum(additions[name] for name in buffer.names))
