"""A flat array as one rank sees it: who its gradients are summed over, and which stretch of it this rank owns.

    shard = "none"     every replica owns all of it, and updates all of it
    else               dp = 3:  [ replica 0 | replica 1 | replica 2 ]

Both the gradients and the weights of the array's parameters are cut like this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcllm.collectives import Group, chunk_range
from hpcllm.model.presence import unit_of
from hpcllm.model.shards import split_dim
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, summed_over_tp
from hpcllm.optim.flat import Flat, Traits, lay_out
from hpcllm.optim.summation import Summation
from hpcllm.policy import is_exact

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """What decides the flat arrays of a stage; equal on all replicas of it."""

    bucket_bytes: float  # of gradients
    codec: str  # of gradients that may be coded
    exact: str  # words that make a parameter exact
    algorithm: str
    seed: int
    shard: str = "none"
    device: torch.device = CPU


@dataclass(frozen=True)
class Groups:
    """Whom a rank shares its gradients with; communicators of their own."""

    replicas: Group  # dp
    ends: Group  # both ends of the pipeline
    tensor: Group | None = None  # tp; None: a rank alone


@dataclass(frozen=True)
class Section:
    flat: Flat
    sharded: bool
    start: int  # of the stretch that this rank owns, in values
    end: int
    summation: Summation
    counts: bool  # in the norm; else another rank has the same gradients and counts them
    additions: int  # that a step makes to the gradients, of all parameters together

    @property
    def owned(self) -> int:
        return self.end - self.start

    def owed(self) -> dict[str, Tensor]:
        """What error feedback of this array's sums owes, by what it belongs to: the memory itself."""
        found = self.summation.owed(self.flat.size, self.owned if self.sharded else None)
        return {f"{', '.join(self.flat.names)}: {what}": surplus for what, surplus in found.items()}

    def views(self, array: Tensor) -> list[Tensor]:
        """The parts of (flat.size,) that belong to each parameter."""
        return list(torch.split(array, list(self.flat.sizes)))


def make_sections(
    parameters: Mapping[str, nn.Parameter],
    additions: Mapping[str, int],
    shared: str | None,
    plan: BucketPlan,
    groups: Groups,
    tp: TensorParallel = ALONE,
) -> list[Section]:
    """The flat arrays of `parameters`, which come in forward order, in the order a backward pass completes them.

    additions: how many times a step adds to a parameter's gradient, by name. shared: the parameter of which the other
    end of the pipeline has a copy, if there is one.
    """

    def traits(name: str) -> Traits:
        unit = unit_of(name) if plan.shard == "all" else ""
        whole = tp.size == 1 or split_dim(name) is None
        return Traits(is_exact(name, plan.exact), whole, summed_over_tp(name, tp), name == shared, unit)

    sizes = {name: p.numel() for name, p in parameters.items()}
    flats = lay_out(sizes, traits, plan.bucket_bytes / 4)
    return [_section(flat, number, additions, plan, groups, tp) for number, flat in enumerate(flats)]


def _section(
    flat: Flat, number: int, additions: Mapping[str, int], plan: BucketPlan, groups: Groups, tp: TensorParallel
) -> Section:
    traits, replicas, sharded = flat.traits, groups.replicas, plan.shard != "none"
    over_tp = (groups.tensor,) if traits.summed and groups.tensor else ()
    over_ends = (groups.ends,) if traits.shared else ()
    codec = "raw" if traits.exact else plan.codec
    summation = Summation(replicas, over_tp + over_ends, codec, plan.algorithm, (plan.seed, number), plan.device)
    start, end = chunk_range(flat.size, replicas.size, replicas.rank) if sharded else (0, flat.size)
    is_first = (sharded or replicas.rank == 0) and (tp.rank == 0 or not traits.whole)
    counts = is_first and (groups.ends.rank == 0 or not traits.shared)
    return Section(flat, sharded, start, end, summation, counts, sum(additions[name] for name in flat.names))
