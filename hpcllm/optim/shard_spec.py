"""A flat buffer as one rank sees it: who its gradients are summed over, and which range of it this rank owns.

    shard = "none"     every replica owns all of it, and updates all of it
    else               dp = 3:  [ replica 0 | replica 1 | replica 2 ]

Both the gradients and the weights of the buffer's parameters are cut like this.

Where each replica is alone on its node, a sum over the network is as two halves, and only the first must be over before
all ranks agree on the norm of the gradients; the second travels while the next forward pass computes:

    backward pass          | agree | next forward pass                       replicas own all of it, but meanwhile
       reduce-scatter ---->           all-gather of the sums ---->           each has the sum of its own range alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcllm.collectives import Group, chunk_range
from hpcllm.collectives.worker import can_thread
from hpcllm.config.policies import FEEDBACK, is_exact
from hpcllm.config.schema import Config, traffic_codecs
from hpcllm.model.shapes import split_dim, unit_of
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, has_partial_gradient
from hpcllm.optim.flat_buffers import FlatBuffer, Traits, lay_out
from hpcllm.optim.gradient_reduce import GradientReduce

MOST_LATE = 64  # replicas: chunks of more are so short that latency decides, and `auto` has other sums for those
Fill = Callable[[str, Tensor], None]  # writes the first values of a parameter, by its name, to memory of its shape


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
    late: bool = False  # the sum comes in two halves, see above
    passes: int = 1  # backward passes of a step, each of which makes as large a part of the additions

    @property
    def owned(self) -> int:
        """Number of values that this rank owns."""
        return self.end - self.start

    @property
    def summed(self) -> tuple[int, int]:
        """First value and end of the range that this rank has the sum of when a step's passes are over."""
        replicas = self.reduce.replicas
        return chunk_range(self.buffer.size, replicas.size, replicas.rank) if self.late else (self.start, self.end)

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
    config: Config,
    groups: Groups,
    tp: TensorParallel = ALONE,
) -> list[ShardSpec]:
    """Flat buffers of `parameters`, given in forward order, in the order in which a backward pass completes them.

    additions: how many times a step adds to a parameter's gradient, by name. shared: the parameter of which the other
    end of the pipeline has a copy, if there is one.
    """
    communication, device = config.communication, next(iter(parameters.values())).device
    codec = traffic_codecs(communication)["gradients"]

    def traits(name: str) -> Traits:
        unit = unit_of(name) if config.optimizer.shard == "all" else ""
        whole = tp.size == 1 or split_dim(name) is None
        return Traits(is_exact(name, communication.exact), whole, has_partial_gradient(name, tp), name == shared, unit)

    sizes = {name: p.numel() for name, p in parameters.items()}
    late = _sums_late(config, codec, groups.replicas)
    passes = min(additions.values())
    specs = []
    for number, buffer in enumerate(lay_out(sizes, traits, communication.bucket_mib * 2**20 / 4)):
        kind, replicas, sharded = buffer.traits, groups.replicas, config.optimizer.shard != "none"
        others = ((groups.tensor,) if kind.tp_partial and groups.tensor else ()) + (groups.ends,) * kind.shared
        name, key = "raw" if kind.exact else codec, (config.run.seed, number)
        reduce = GradientReduce(replicas, others, name, communication.algorithm, key, device)
        start, end = chunk_range(buffer.size, replicas.size, replicas.rank) if sharded else (0, buffer.size)
        is_first = (sharded or late or replicas.rank == 0) and (tp.rank == 0 or not kind.whole)
        counts = is_first and (groups.ends.rank == 0 or not kind.shared)
        added = sum(additions[name] for name in buffer.names)
        specs.append(ShardSpec(buffer, sharded, start, end, reduce, counts, added, late, passes))
    return specs


def _sums_late(config: Config, codec: str, replicas: Group) -> bool:
    """True if sums come in two halves: between nodes alone, for inside one a sum is one pass over shared memory.

    Not with error feedback, which knows what the whole sum has lost, nor with an algorithm of the user's.
    """
    if config.optimizer.shard != "none" or config.communication.algorithm != "auto" or codec.endswith(FEEDBACK):
        return False
    return 1 < replicas.nodes == replicas.size <= MOST_LATE and can_thread()
