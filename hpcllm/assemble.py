"""From a checked run file to the parts of one rank: everything that is refused is refused here, before any work.

Config --+-- mesh sizes, batch split -----> Mesh, MicroBatches
         +-- token store -----------------> vocabulary, Sampler
         +-- span of this stage ----------> Decoder --> GradientBuckets, AdamW, Engine
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives import Group, group_of, shared_zeros
from hpcllm.collectives.select import Tuning, link_codec, load_tuning, use_tuning
from hpcllm.collectives.wire import Wire
from hpcllm.config import Config, divisors, traffic_codecs
from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError, DataError, MeshError, UserError
from hpcllm.machines import peak_tflops
from hpcllm.mesh import Mesh, mesh_sizes, open_mesh
from hpcllm.metrics import Traffic
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.model.transformer import Decoder
from hpcllm.optim.adamw import make_adamw
from hpcllm.optim.buckets import BucketPlan, GradientBuckets, make_buckets
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import Codecs, Link
from hpcllm.pipeline.schedules import SCHEDULES, stage_actions
from hpcllm.together import on_root
from hpcllm.waiting import Waits


@dataclass(frozen=True)
class Parts:
    """What one rank trains with. Plain values; the loop in train.py is where they meet."""

    config: Config  # vocabulary and dp filled in
    mesh: Mesh
    store: TokenStore
    tokens: NDArray[np.integer]  # of the training split, mapped once: a store rewritten meanwhile changes nothing
    sampler: Sampler
    decoder: Decoder
    parameters: dict[str, torch.nn.Parameter]
    shared: str | None  # the parameter of which the other end of the pipeline has a copy
    gradients: GradientBuckets
    wire: Wire  # of the gradients
    adamw: torch.optim.AdamW
    engine: Engine
    actions: list[Action]
    control: Waits
    peak_tflops: float | None  # of one rank; None: not known

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that this stage answers for: a shared embedding belongs to the first stage."""
        is_copy = self.mesh.pp.rank > 0
        return frozenset(name for name in self.parameters if not (is_copy and name == self.shared))

    @property
    def run_folder(self) -> Path:
        return Path(self.config.run.folder) / self.config.run.name

    @property
    def last_backward(self) -> int:
        """The microbatch whose backward pass makes the gradients final."""
        return next(action.microbatch for action in reversed(self.actions) if action.op is Op.BACKWARD)

    def traffic(self) -> Traffic:
        """So far, of this rank: see metrics.TRAFFIC for the order."""
        link, gradients = self.engine.link, self.gradients
        exposed_s = link.waits.total_s + gradients.worker.exposed_s + self.control.total_s
        ways = [count[way] for way in (Op.FORWARD, Op.BACKWARD) for count in (link.plain_bytes, link.sent_bytes)]
        return np.array([exposed_s, gradients.hidden_s, self.wire.plain_bytes, self.wire.sent_bytes, *ways])


def check_layout(config: Config, ranks: int) -> Config:
    """The config with dp filled in. Raises MeshError if ranks, mesh and batch do not fit together. Pure."""
    dp = mesh_sizes(ranks, config.mesh)["dp"]
    batch, microbatches = config.data.global_batch, config.pipeline.microbatches
    if batch % dp:
        raise MeshError(
            f"data.global_batch = {batch} does not split over mesh.dp = {dp} replicas; valid dp: {divisors(batch)}"
        )
    if batch // dp % microbatches:
        raise MeshError(
            f"pipeline.microbatches = {microbatches} does not divide the {batch // dp} samples of a replica "
            f"(data.global_batch = {batch} over mesh.dp = {dp}); valid: {divisors(batch // dp)}"
        )
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, dp=dp))


def open_store(config: Config, comm: MPI.Intracomm) -> tuple[Config, TokenStore]:
    """The token store, and the config with its vocabulary filled in. Collective over comm. Raises UserError."""
    if not config.data.store:
        raise ConfigError("data.store is missing: the path of a token store, written by `python -m hpcllm prepare`")
    store = TokenStore.open(config.data.store, comm)
    tokens = len(store.tokens("train"))
    if sample_count(tokens, config.data.sequence_length) < 1:
        raise DataError(
            f"{config.data.store!r} has {tokens} training tokens, too few for one sample of "
            f"data.sequence_length = {config.data.sequence_length} and its last target; prepare more text"
        )
    vocabulary = config.model.vocabulary or store.vocabulary
    if vocabulary < store.vocabulary:
        raise ConfigError(
            f"model.vocabulary = {vocabulary} is smaller than that of {config.data.store!r}, {store.vocabulary}; "
            f"valid: {store.vocabulary} or more, or 0 to take the store's"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=vocabulary)), store


@contextmanager
def assemble(config: Config, comm: MPI.Intracomm) -> Iterator[Parts]:
    """Everything that this rank needs, with initial weights. Collective over comm. Raises UserError."""
    config = check_layout(config, comm.size)
    config, store = open_store(config, comm)
    peak, tuning = on_root(comm, lambda: (peak_tflops(config.run.machine, torch.get_num_threads()), _tuning(config)))
    with open_mesh(comm, config.mesh) as mesh:
        parts = _build(config, mesh, store, peak, tuning)
        yield parts
        parts.gradients.worker.close()


def _tuning(config: Config) -> Tuning | None:
    return load_tuning(config.communication.tuning) if config.communication.tuning else None


def _build(config: Config, mesh: Mesh, store: TokenStore, peak_tflops: float | None, tuning: Tuning | None) -> Parts:
    data, limit_s = config.data, config.limits.stall_s
    decoder = build(config.model, split_layers(config.model, mesh.pp.size)[mesh.pp.rank], config.run.seed)
    parameters = dict(decoder.named_parameters())
    tokens = store.tokens("train")
    shared = "embedding.weight" if config.model.tied and mesh.ends.size > 1 else None
    wire = Wire(Waits(limit_s))
    return Parts(
        config=config,
        mesh=mesh,
        store=store,
        tokens=tokens,
        sampler=Sampler(sample_count(len(tokens), data.sequence_length), config.run.seed),
        decoder=decoder,
        parameters=parameters,
        shared=shared,
        gradients=_gradients(config, mesh, parameters, shared, wire, tuning),
        wire=wire,
        adamw=make_adamw(parameters, config.optimizer),
        engine=Engine(decoder, _link(config, mesh, tuning)),
        actions=stage_actions(
            SCHEDULES[config.pipeline.schedule], mesh.pp.rank, mesh.pp.size, config.pipeline.microbatches
        ),
        control=Waits(limit_s),
        peak_tflops=peak_tflops,
    )


def _gradients(
    config: Config,
    mesh: Mesh,
    parameters: dict[str, torch.nn.Parameter],
    shared: str | None,
    wire: Wire,
    tuning: Tuning | None,
) -> GradientBuckets:
    communication = config.communication
    plan = BucketPlan(
        bucket_bytes=communication.bucket_mib * 2**20,
        codec=traffic_codecs(communication)["gradients"],
        exact=communication.exact,
        algorithm=communication.algorithm,
        seed=config.run.seed,
    )
    replicas, ends = group_of(mesh.dp), group_of(mesh.ends)
    for group in (replicas, ends):
        group.wire = wire
        if tuning:
            use_tuning(group, tuning)
    return make_buckets(parameters, shared, plan, replicas, ends, lambda n: _memory(n, replicas))


def _memory(n: int, replicas: Group) -> torch.Tensor:
    """(n,) zeros for gradients, where the replicas of a node can sum them in place. Collective over replicas."""
    if replicas.node.size == 1:
        return torch.zeros(n)
    try:
        return shared_zeros(n, replicas)
    except UserError as error:  # a small /dev/shm, as in many containers: slower, for sums copy through a small window
        if replicas.rank == 0:
            print(f"hpcllm: gradients lie in private memory, and their sums take longer: {error}", file=sys.stderr)
        return torch.zeros(n)


def _link(config: Config, mesh: Mesh, tuning: Tuning | None) -> Link:
    size = config.data.global_batch // mesh.dp.size // config.pipeline.microbatches
    shape = (size, config.data.sequence_length, config.model.hidden)
    codecs: Codecs = {}
    for way, kind in ((Op.FORWARD, "forward"), (Op.BACKWARD, "backward")):
        for peer in (mesh.pp.rank - 1, mesh.pp.rank + 1):
            if 0 <= peer < mesh.pp.size:
                name = traffic_codecs(config.communication)[kind]
                codecs[way, peer] = link_codec(name, math.prod(shape), mesh.shares_node(peer), tuning)
    return Link(mesh, shape, Waits(config.limits.stall_s), codecs)
