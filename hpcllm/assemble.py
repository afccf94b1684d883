"""From a checked run file to the parts of one rank: everything that is refused is refused here, before any work.

Config --+-- mesh sizes, batch split -----> Mesh, MicroBatches
         +-- token store -----------------> vocabulary, Sampler
         +-- span of this stage ----------> Decoder --> GradientBuckets, AdamW, Engine
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.codecs import CODECS
from hpcllm.config import Config, divisors
from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError, DataError, MeshError
from hpcllm.machines import peak_tflops
from hpcllm.mesh import Mesh, mesh_sizes, open_mesh
from hpcllm.metrics import Traffic
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.model.transformer import Decoder
from hpcllm.optim.adamw import make_adamw
from hpcllm.optim.buckets import GradientBuckets, make_buckets
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import Link
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
        """So far, of this rank: seconds in which it could not compute for want of a message, then bytes sent."""
        link, gradients = self.engine.link, self.gradients
        waited_s = link.waits.total_s + gradients.worker.exposed_s + self.control.total_s
        return np.array([waited_s, gradients.sent_bytes, link.sent_bytes])


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
    peak = on_root(comm, lambda: peak_tflops(config.run.machine, torch.get_num_threads()))
    with open_mesh(comm, config.mesh) as mesh:
        parts = _build(config, mesh, store, peak)
        yield parts
        parts.gradients.worker.close()


def _build(config: Config, mesh: Mesh, store: TokenStore, peak_tflops: float | None) -> Parts:
    data, limit_s = config.data, config.limits.stall_s
    decoder = build(config.model, split_layers(config.model, mesh.pp.size)[mesh.pp.rank], config.run.seed)
    parameters = dict(decoder.named_parameters())
    size = data.global_batch // mesh.dp.size // config.pipeline.microbatches
    link = Link(mesh, (size, data.sequence_length, config.model.hidden), Waits(limit_s))
    schedule = SCHEDULES[config.pipeline.schedule]
    tokens = store.tokens("train")
    shared = "embedding.weight" if config.model.tied and mesh.ends.size > 1 else None
    return Parts(
        config=config,
        mesh=mesh,
        store=store,
        tokens=tokens,
        sampler=Sampler(sample_count(len(tokens), data.sequence_length), config.run.seed),
        decoder=decoder,
        parameters=parameters,
        shared=shared,
        gradients=make_buckets(
            parameters,
            shared,
            config.communication.bucket_mib * 2**20,
            mesh,
            CODECS[config.communication.gradients],
            config.communication.algorithm,
            Waits(limit_s),
        ),
        adamw=make_adamw(parameters, config.optimizer),
        engine=Engine(decoder, link),
        actions=stage_actions(schedule, mesh.pp.rank, mesh.pp.size, config.pipeline.microbatches),
        control=Waits(limit_s),
        peak_tflops=peak_tflops,
    )
