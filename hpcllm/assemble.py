"""From a checked run file to the parts of one rank: everything that is refused is refused here, before any work.

Config --+-- mesh sizes, batch split -----> Mesh, microbatches
         +-- token store -----------------> vocabulary, Sampler
         +-- schedule, spans of layers ---> a Decoder a chunk --> GradientBuckets, AdamW, Engine
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives import Group, group_of, shared_zeros
from hpcllm.collectives.select import Tuning, link_codec, load_tuning, use_tuning
from hpcllm.collectives.wire import Wire
from hpcllm.config import Config, traffic_codecs
from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError, DataError, ScheduleError, UserError
from hpcllm.layout import check_layout, schedule_of, spans_of
from hpcllm.machines import peak_tflops
from hpcllm.mesh import Mesh, describe_rank, open_mesh
from hpcllm.metrics import Traffic
from hpcllm.model.initialisation import build_chunks
from hpcllm.model.transformer import Decoder
from hpcllm.optim.adamw import make_adamw
from hpcllm.optim.buckets import BucketPlan, GradientBuckets, make_buckets
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.chunk import Chunk, additions
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import BACKWARD, FORWARD, Codecs, Link
from hpcllm.pipeline.placement import Placement
from hpcllm.pipeline.schedules import Schedule
from hpcllm.pipeline.timing import simulate
from hpcllm.together import on_root
from hpcllm.waiting import Waits
from hpcllm.watch import Watch, watching


@dataclass(frozen=True)
class Parts:
    """What one rank trains with. Plain values; the loop in train.py is where they meet."""

    config: Config  # vocabulary and dp filled in
    mesh: Mesh
    store: TokenStore
    tokens: NDArray[np.integer]  # of the training split, mapped once: a store rewritten meanwhile changes nothing
    sampler: Sampler
    schedule: Schedule  # checked
    bubble: float  # share of a step that it lets a rank idle, if a backward pass takes twice a forward pass
    parameters: dict[str, torch.nn.Parameter]  # of this rank, in the order of the model
    shared: str | None  # the parameter of which the other end of the pipeline has a copy
    has_head: bool  # the loss is made on this rank
    gradients: GradientBuckets
    wire: Wire  # of the gradients
    adamw: torch.optim.AdamW
    engine: Engine
    control: Waits
    watch: Watch
    peak_tflops: float | None  # of one rank; None: not known

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that this rank answers for: a shared embedding belongs to the first stage."""
        is_copy = self.mesh.pp.rank > 0
        return frozenset(name for name in self.parameters if not (is_copy and name == self.shared))

    @property
    def run_folder(self) -> Path:
        return Path(self.config.run.folder) / self.config.run.name

    def traffic(self) -> Traffic:
        """So far, of this rank: see metrics.TRAFFIC for the order."""
        link, gradients = self.engine.link, self.gradients
        exposed_s = link.waits.total_s + gradients.worker.exposed_s + self.control.total_s
        ways = [count[way] for way in (FORWARD, BACKWARD) for count in (link.plain_bytes, link.sent_bytes)]
        return np.array([exposed_s, gradients.hidden_s, self.wire.plain_bytes, self.wire.sent_bytes, *ways])


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
    schedule, bubble = _open_schedule(config, comm)
    config, store = open_store(config, comm)
    spans = spans_of(config, schedule.placement)  # knows the vocabulary by now, which the head's cost depends on
    peak, tuning = on_root(comm, lambda: (peak_tflops(config.run.machine, torch.get_num_threads()), _tuning(config)))
    place = partial(describe_rank, ranks=comm.size, config=config.mesh)
    with open_mesh(comm, config.mesh) as mesh, watching(mesh.world, place) as watch:
        mine = [schedule.placement.stage(mesh.pp.rank, chunk) for chunk in range(schedule.placement.chunks)]
        decoders = build_chunks(config.model, [spans[stage] for stage in mine], config.run.seed)
        parts = _build(config, mesh, schedule, bubble, decoders, store, peak, tuning, watch)
        yield parts
        parts.gradients.worker.close()


def _tuning(config: Config) -> Tuning | None:
    return load_tuning(config.communication.tuning) if config.communication.tuning else None


def _open_schedule(config: Config, comm: MPI.Intracomm) -> tuple[Schedule, float]:
    """The schedule of the run, checked, and its bubble. Collective over comm. Raises ScheduleError."""
    file = config.pipeline.file
    schedule = schedule_of(config, on_root(comm, lambda: _schedule_text(file) if file else ""))

    def prove() -> float:
        check(schedule)
        return simulate(schedule).bubble

    return schedule, on_root(comm, prove)


def _schedule_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read pipeline.file = {file!r}: {error}") from error


def _build(
    config: Config,
    mesh: Mesh,
    schedule: Schedule,
    bubble: float,
    decoders: list[Decoder],
    store: TokenStore,
    peak_tflops: float | None,
    tuning: Tuning | None,
    watch: Watch,
) -> Parts:
    data, limit_s = config.data, config.limits.stall_s
    parameters = {name: p for decoder in decoders for name, p in decoder.named_parameters()}
    tokens = store.tokens("train")
    is_cut = schedule.placement.home(schedule.placement.stages - 1)[0] != 0  # embedding and head are on two ranks
    shared = "embedding.weight" if config.model.tied and is_cut and mesh.ends.size > 1 else None
    wire = Wire(Waits(limit_s, watch=watch))
    counts = additions(decoders, schedule.actions[mesh.pp.rank])
    gradients = _gradients(config, mesh, parameters, counts, shared, wire, tuning)
    link = _link(config, mesh, schedule.placement, tuning, watch)
    return Parts(
        config=config,
        mesh=mesh,
        store=store,
        tokens=tokens,
        sampler=Sampler(sample_count(len(tokens), data.sequence_length), config.run.seed),
        schedule=schedule,
        bubble=bubble,
        parameters=parameters,
        shared=shared,
        has_head=decoders[-1].span.has_head,
        gradients=gradients,
        wire=wire,
        adamw=make_adamw(parameters, config.optimizer),
        engine=Engine([Chunk(decoder) for decoder in decoders], link, gradients.added),
        control=Waits(limit_s, watch=watch),
        watch=watch,
        peak_tflops=peak_tflops,
    )


def _gradients(
    config: Config,
    mesh: Mesh,
    parameters: dict[str, torch.nn.Parameter],
    counts: Mapping[str, int],
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
    return make_buckets(parameters, counts, shared, plan, replicas, ends, lambda n: _memory(n, replicas))


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


def _link(config: Config, mesh: Mesh, placement: Placement, tuning: Tuning | None, watch: Watch) -> Link:
    size = config.data.global_batch // mesh.dp.size // config.pipeline.microbatches
    shape = (size, config.data.sequence_length, config.model.hidden)
    codecs: Codecs = {}
    neighbours = {(mesh.pp.rank + step) % mesh.pp.size for step in (-1, 1)} - {mesh.pp.rank}
    for way, kind in ((FORWARD, "forward"), (BACKWARD, "backward")):
        for peer in neighbours:
            name = traffic_codecs(config.communication)[kind]
            codecs[way, peer] = link_codec(name, math.prod(shape), mesh.shares_node(peer), tuning)
    return Link(mesh, placement, shape, Waits(config.limits.stall_s, watch=watch), codecs)
