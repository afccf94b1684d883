"""From a run file to one rank's gradients and optimizer: groups, memory, and what the shard level asks for.

parameters --> sections --+--> gradients   wires["gradients"],  node-shared memory
                          +--> weights     wires["parameters"], node-shared memory
                          +--> shares: AdamW on what this rank owns
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hpcllm.collectives import Group, group_of, prepare, shared_zeros
from hpcllm.collectives.group import make_group
from hpcllm.collectives.select import Tuning, use_tuning
from hpcllm.collectives.wire import Wire
from hpcllm.collectives.worker import Worker
from hpcllm.config import Config, traffic_codecs
from hpcllm.errors import UserError
from hpcllm.mesh import Mesh
from hpcllm.model.tensor_parallel import TensorParallel
from hpcllm.optim.buckets import Gradients, make_buckets
from hpcllm.optim.optimizer import Optimizer, make_optimizer
from hpcllm.optim.passing import make_passages
from hpcllm.optim.sections import BucketPlan, Groups, make_sections
from hpcllm.optim.units import UnitWeights
from hpcllm.optim.weights import Fill, GatheredWeights, Weights, WholeWeights
from hpcllm.waiting import Waits
from hpcllm.watch import Watch

KINDS = ("gradients", "parameters")  # of traffic


@dataclass(frozen=True)
class Optimization:
    """Everything of a rank that stands between its backward pass and its next forward pass."""

    gradients: Gradients
    optimizer: Optimizer
    worker: Worker
    wires: Mapping[str, Wire]  # by kind of traffic
    own_groups: tuple[Group, ...]  # that no communicator frees

    def close(self) -> None:
        """Return when nothing is on its way any more, and free what was taken. Collective over the mesh."""
        self.worker.close()
        for group in self.own_groups:
            group.free()


def assemble_optimizer(
    config: Config,
    mesh: Mesh,
    parameters: Mapping[str, nn.Parameter],
    fill: Fill,
    additions: Mapping[str, int],
    shared: str | None,
    tp: TensorParallel,
    tuning: Tuning | None,
    watch: Watch,
) -> Optimization:
    """parameters: of this rank, in forward order, without values: `fill` gives those where the shard level wants them.

    additions, shared: see make_sections. Collective over the mesh.
    """
    communication, shard = config.communication, config.optimizer.shard
    device = next(iter(parameters.values())).device
    wires = {kind: Wire(Waits(config.limits.stall_s, watch=watch)) for kind in KINDS}
    # sums over tp have messages of their own: the layers' travel at the same time, from another thread
    over_tp = make_group(mesh.tp) if tp.sequence else None
    groups = Groups(group_of(mesh.dp), group_of(mesh.ends), over_tp)
    gathering = make_group(mesh.dp) if shard != "none" else None
    for group in (groups.replicas, groups.ends, over_tp, gathering):
        if group:
            group.wire = wires["parameters" if group is gathering else "gradients"]
            use_tuning(group, tuning)
            prepare(group, device.type == "cpu")  # before it moves to a thread of its own
    plan = BucketPlan(
        bucket_bytes=communication.bucket_mib * 2**20,
        codec=traffic_codecs(communication)["gradients"],
        exact=communication.exact,
        algorithm=communication.algorithm,
        seed=config.run.seed,
        shard=shard,
        device=device,
    )
    sections = make_sections(parameters, additions, shared, plan, groups, tp)
    worker, codec = Worker(device=device), traffic_codecs(communication)["parameters"]
    gradients: Gradients
    if shard in ("none", "states"):
        flat = partial(_memory, dtype=torch.float32, group=groups.replicas, device=device)
        gradients = make_buckets(sections, parameters, worker, flat)
    else:
        gradients = make_passages(sections, parameters, worker)
    weights: Weights
    if gathering is None:
        weights = WholeWeights(sections, parameters, fill)
    elif shard == "all":
        weights = UnitWeights(sections, parameters, fill, codec, gathering, worker)
    else:
        memory = partial(_memory, group=gathering, device=device)
        weights = GatheredWeights(sections, parameters, fill, codec, gathering, worker, memory)
    optimizer = make_optimizer(sections, parameters, gradients.shares, weights, codec, mesh.dp, config.optimizer)
    return Optimization(gradients, optimizer, worker, wires, tuple(g for g in (over_tp, gathering) if g))


def _memory(n: int, dtype: torch.dtype, group: Group, device: torch.device) -> torch.Tensor:
    """(n,) zeros, on the CPU where the ranks of a node can sum and gather them in place. Collective over the group."""
    if group.node.size == 1 or device.type != "cpu":
        return torch.zeros(n, dtype=dtype, device=device)
    try:
        return shared_zeros(n, group, dtype)
    except UserError as error:  # a small /dev/shm, as in many containers: slower, for copies through a small window
        if group.rank == 0:
            print(f"hpcllm: arrays lie in private memory, and their sums take longer: {error}", file=sys.stderr)
        return torch.zeros(n, dtype=dtype)
