"""One rank's optimizer: from a run file to its parts, what they update, what a checkpoint keeps.

    shard              gradients        states, master     weights
    none               whole            whole              whole
    states             whole            share              whole, gathered after each update           ZeRO-1
    states+gradients   share            share              whole, gathered after each update           ZeRO-2
    all                share            share              share, gathered unit by unit when used      ZeRO-3

    offload: states and masters rest in host memory (host_states.py)

    parameters --> shard specs --+--> gradients   wires["gradients"],  node-shared memory
                                 +--> weights     wires["parameters"], node-shared memory
                                 +--> shares: AdamW on what this rank owns

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
arXiv:1910.02054, section 5.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hpcllm.collectives import Group, chunk_range, group_of, prepare, shared_zeros
from hpcllm.collectives.group import make_group
from hpcllm.collectives.tuning import Tuning
from hpcllm.collectives.wire import Wire
from hpcllm.collectives.worker import Worker
from hpcllm.config.schema import Config, OptimizerConfig, traffic_codecs
from hpcllm.errors import UserError
from hpcllm.model.tensor_parallel import TensorParallel, has_partial_gradient
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import Waits
from hpcllm.mpi.watchdog import Watchdog
from hpcllm.optim.adamw import Share, make_share, state_kinds
from hpcllm.optim.buckets import GradientBuckets, Gradients, ShardedGradients
from hpcllm.optim.flat_buffers import Piece
from hpcllm.optim.host_states import HostStates
from hpcllm.optim.shard_spec import Fill, Groups, ShardSpec, make_shard_specs
from hpcllm.optim.weights import GatheredWeights, LateWeights, Weights, Zero3Weights

KINDS = ("gradients", "parameters")  # of traffic


@dataclass
class Optimizer:
    """Updates this rank's shares of the weights and lets the replicas have them."""

    shares: list[Share]  # one for each flat buffer, in the order of a backward pass
    weights: Weights
    replica: int  # this rank's number among the replicas
    replicas: int
    host_states: HostStates | None = None  # where states rest, if not on the device
    updates: int = 0  # made so far

    def update(self, learning_rate: float, factor: float) -> None:
        """Make an AdamW step with the gradients times `factor`; then gather the replicas' shares, in the background.

        Where sums are late they are gathered first, and an update is made when its weights are used. Collective over
        the replicas.
        """
        self.updates += 1
        for number, share in reversed(list(enumerate(self.shares))):  # the next forward pass wants the last one first
            self.weights.update(number, partial(self._update, number, share, learning_rate, 1 / factor))

    def _update(self, number: int, share: Share, learning_rate: float, divisor: float) -> None:
        with self.host_states.at_hand(number) if self.host_states else nullcontext():
            is_rounded = share.update(learning_rate, divisor, self.weights.writable(number))
            self.weights.refresh(number, None if is_rounded else share.master)

    def settle(self) -> None:
        """Return when all weights that this rank holds are up to date, and states where they rest."""
        self.weights.settle()
        if self.host_states:
            self.host_states.settle()

    def pieces_to_write(self) -> list[Piece]:
        """Pieces that this rank writes to a checkpoint: all replicas' pieces have each element once. Settles first."""
        self.settle()
        pieces: list[Piece] = []
        for share in self.shares:
            spec = share.spec
            whole = chunk_range(spec.buffer.size, self.replicas, self.replica)
            pieces += share.pieces(*((spec.start, spec.end) if spec.sharded else whole))
        return pieces

    def pieces_to_read(self) -> list[Piece]:
        """Pieces that this rank needs from a checkpoint, to be filled in place; then call `loaded`."""
        self.settle()
        return [piece for share in self.shares for piece in share.pieces(share.spec.start, share.spec.end)]

    def residuals(self) -> dict[str, Tensor]:
        """Residuals of error feedback of the gradients, by what each belongs to. The worker must be idle."""
        return {what: residual for share in self.shares for what, residual in share.spec.residuals().items()}

    def loaded(self, updates: int) -> None:
        """Go on from pieces that were filled; their state has seen so many updates. Collective over the replicas."""
        self.updates = updates
        for share in self.shares:
            share.updates = updates
        self.weights.restored()


@dataclass(frozen=True)
class Optimization:
    """All of a rank that stands between its backward pass and its next forward pass."""

    gradients: Gradients
    optimizer: Optimizer
    worker: Worker
    wires: Mapping[str, Wire]  # by kind of traffic
    own_groups: tuple[Group, ...]  # groups that are freed with no communicator

    def close(self) -> None:
        """Return when nothing is under way any more, and free what was taken. Collective over the mesh."""
        self.worker.close()
        if self.optimizer.host_states:
            self.optimizer.host_states.settle()
        for group in self.own_groups:
            group.free()


def make_optimization(
    config: Config,
    mesh: Mesh,
    parameters: Mapping[str, nn.Parameter],
    fill: Fill,
    additions: Mapping[str, int],
    shared: str | None,
    tp: TensorParallel,
    tuning: Tuning | None,
    watchdog: Watchdog,
) -> Optimization:
    """Gradients and optimizer of one rank as the run file's shard level says. Collective over the mesh.

    parameters: those of this rank that are trained, in forward order, without values: `fill` writes those where the
    shard level puts them.
    additions, shared: see make_shard_specs.
    """
    shard, codec = config.optimizer.shard, traffic_codecs(config.communication)["parameters"]
    device = next(iter(parameters.values())).device
    wires = {kind: Wire(Waits(config.limits.stall_s, observer=watchdog)) for kind in KINDS}
    # sums over tp have messages of their own: the layers' travel at the same time, from another thread
    over_tp = make_group(mesh.tp) if any(has_partial_gradient(name, tp) for name in parameters) else None
    groups = Groups(group_of(mesh.dp), group_of(mesh.ends), over_tp)
    gathering = make_group(mesh.dp) if shard != "none" else None
    for group in (groups.replicas, groups.ends, over_tp, gathering):
        if group:
            group.wire = wires["parameters" if group is gathering else "gradients"]
            group.use_tuning(tuning)
            prepare(group, device.type == "cpu")  # before it moves to a thread of its own
    specs, worker = make_shard_specs(parameters, additions, shared, config, groups, tp), Worker(device=device)
    gradients: Gradients
    if shard in ("none", "states"):
        memory = partial(_zeros, dtype=torch.float32, group=groups.replicas, device=device)
        gradients = buckets = GradientBuckets(specs, parameters, worker, memory)
    else:
        gradients = ShardedGradients(specs, parameters, worker)
    if gathering is None and any(spec.late for spec in specs):
        weights: Weights = LateWeights(specs, parameters, fill, buckets.gather, worker)
    elif gathering is None:
        weights = Weights(specs, parameters, fill)
    elif shard == "all":
        weights = Zero3Weights(specs, parameters, fill, codec, gathering, worker)
    else:
        zeros = partial(_zeros, group=gathering, device=device)
        weights = GatheredWeights(specs, parameters, fill, codec, gathering, worker, zeros)
    keeps_master = weights.is_lossy or next(iter(parameters.values())).dtype != torch.float32
    sizes, kinds = [spec.owned for spec in specs], len(state_kinds(keeps_master))
    host_states = HostStates(sizes, kinds, device) if config.optimizer.offload else None
    shares = _make_shares(specs, parameters, gradients.shares, weights, keeps_master, host_states, config.optimizer)
    optimizer = Optimizer(shares, weights, mesh.dp.rank, mesh.dp.size, host_states)
    return Optimization(gradients, optimizer, worker, wires, tuple(group for group in (over_tp, gathering) if group))


def _make_shares(
    specs: Sequence[ShardSpec],
    parameters: Mapping[str, nn.Parameter],
    gradients: Sequence[Tensor],
    weights: Weights,
    keeps_master: bool,
    host_states: HostStates | None,
    config: OptimizerConfig,
) -> list[Share]:
    """gradients: for each flat buffer, the memory of the sums that this rank owns.

    Master weights are kept where the model's are of 16 bits, or replicas hold what a lossy codec made of them.
    """
    is_matrix = {name for name, p in parameters.items() if p.dim() > 1}.__contains__
    shares = []
    for number, (spec, sums) in enumerate(zip(specs, gradients, strict=True)):
        places = (host_states.landing(number), host_states.homes[number]) if host_states else ((), ())
        shares.append(make_share(spec, weights.owned(number), sums, keeps_master, is_matrix, config, *places))
    return shares


def _zeros(n: int, dtype: torch.dtype, group: Group, device: torch.device) -> torch.Tensor:
    """(n,) zeros, on the CPU where the ranks of a node can sum and gather them in place. Collective over the group."""
    if group.node.size == 1 or device.type != "cpu":
        return torch.zeros(n, dtype=dtype, device=device)
    try:
        return shared_zeros(n, group, dtype)
    except UserError as error:  # a small /dev/shm, as in many containers: slower, for copies through a small window
        if group.rank == 0:
            print(f"hpcllm: arrays lie in private memory, and their sums take longer: {error}", file=sys.stderr)
        return torch.zeros(n, dtype=dtype)
