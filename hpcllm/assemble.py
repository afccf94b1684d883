"""From a checked run file to the parts of one rank: everything that is refused is refused here, before any work.

Config --+-- mesh sizes, batch split -----> Mesh, microbatches
         +-- token store -----------------> vocabulary, Sampler
         +-- schedule, spans of layers ---> a Decoder a chunk --> Gradients, Optimizer, Engine
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.axes import describe_rank
from hpcllm.checkpoint.mpio import check_writer
from hpcllm.collectives import group_of, prepare
from hpcllm.collectives.select import Tuning, link_codec, load_tuning, use_tuning
from hpcllm.config import Config, traffic_codecs
from hpcllm.data.sampler import Sampler, sample_count
from hpcllm.data.store import TokenStore
from hpcllm.interchange.start import take_model
from hpcllm.layout import check_layout, check_vocabulary, custom_text, recompute_of, schedule_of, spans_of
from hpcllm.mesh import Mesh, open_mesh
from hpcllm.metrics import Traffic
from hpcllm.model.initialisation import allocate_chunks, initial_values
from hpcllm.model.tensor_parallel import LANE, TensorParallel, tensor_parallel, traffic
from hpcllm.model.transformer import Decoder
from hpcllm.optim.assembly import KINDS, Optimization, assemble_optimizer
from hpcllm.optim.buckets import Gradients
from hpcllm.optim.optimizer import Optimizer
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.chunk import Chunk, additions
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import BACKWARD, FORWARD, Codecs, Link
from hpcllm.pipeline.placement import Placement
from hpcllm.pipeline.schedules import Schedule
from hpcllm.pipeline.timing import simulate
from hpcllm.placing import Placed, place_rank
from hpcllm.precision import LossScale, compute_dtype, make_loss_scale
from hpcllm.run_store import open_store
from hpcllm.samples import Samples
from hpcllm.together import on_root
from hpcllm.waiting import Waits
from hpcllm.watch import Watch, watching


@dataclass(frozen=True)
class Parts:
    """What one rank trains with. Plain values; the loop in train.py is where they meet."""

    config: Config  # vocabulary and dp filled in
    mesh: Mesh
    tp: TensorParallel
    store: TokenStore
    placed: Placed
    samples: Samples
    schedule: Schedule  # checked
    bubble: float  # share of a step that it lets a rank idle, if a backward pass takes twice a forward pass
    parameters: dict[str, torch.nn.Parameter]  # of this rank, in the order of the model
    shared: str | None  # the parameter of which the other end of the pipeline has a copy
    has_loss: bool  # this rank is the one of its replica that says what the loss is
    optimization: Optimization
    loss_scale: LossScale
    engine: Engine
    control: Waits
    watch: Watch

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that this rank answers for: a shared embedding belongs to the first stage."""
        is_copy = self.mesh.pp.rank > 0
        return frozenset(name for name in self.parameters if not (is_copy and name == self.shared))

    @property
    def device(self) -> torch.device:
        return self.placed.device

    @property
    def gradients(self) -> Gradients:
        return self.optimization.gradients

    @property
    def optimizer(self) -> Optimizer:
        return self.optimization.optimizer

    @property
    def run_folder(self) -> Path:
        return Path(self.config.run.folder) / self.config.run.name

    def traffic(self) -> Traffic:
        """So far, of this rank: see metrics.TRAFFIC for the order."""
        link, worker, wires = self.engine.link, self.optimization.worker, self.optimization.wires
        tensor_s, *tensor_bytes = traffic(self.tp)
        exposed_s = link.waits.total_s + worker.exposed_s + tensor_s
        shared = [count for kind in KINDS for count in (wires[kind].plain_bytes, wires[kind].sent_bytes)]
        ways = [count[way] for way in (FORWARD, BACKWARD) for count in (link.plain_bytes, link.sent_bytes)]
        return np.array([exposed_s, worker.hidden_s, *shared, *ways, *tensor_bytes])


@contextmanager
def assemble(config: Config, comm: MPI.Intracomm) -> Iterator[Parts]:
    """Everything that this rank needs, with initial weights. Collective over comm. Raises UserError."""
    check_writer(config.checkpoint.writer)
    config = check_layout(take_model(config, comm), comm.size)
    schedule, bubble = _open_schedule(config, comm)
    config, store = open_store(config, comm)
    check_vocabulary(config)
    spans = spans_of(config, schedule.placement)  # knows the vocabulary by now, which the head's cost depends on
    recompute = recompute_of(config, schedule.placement)
    tuning = on_root(comm, lambda: _tuning(config))
    place = partial(describe_rank, ranks=comm.size, config=config.mesh)
    with open_mesh(comm, config.mesh) as mesh, watching(mesh.world, place) as watch:
        placed = place_rank(config, mesh)
        mine = [schedule.placement.stage(mesh.pp.rank, chunk) for chunk in range(schedule.placement.chunks)]
        tp = _tensor_parallel(config, mesh, tuning, watch)
        mine_spans, bare = [spans[stage] for stage in mine], config.optimizer.shard != "none"
        decoders = allocate_chunks(config.model, mine_spans, tp, compute_dtype(config), placed.device, bare)
        for stage, decoder in zip(mine, decoders, strict=True):
            decoder.recompute = recompute[stage]
            decoder.loss_tokens = config.pipeline.loss_tokens
        parts = _build(config, mesh, tp, schedule, bubble, decoders, store, placed, tuning, watch)
        yield parts
        parts.optimization.close()


def _tuning(config: Config) -> Tuning | None:
    return load_tuning(config.communication.tuning) if config.communication.tuning else None


def _open_schedule(config: Config, comm: MPI.Intracomm) -> tuple[Schedule, float]:
    """The schedule of the run, checked, and its bubble. Collective over comm. Raises ScheduleError."""
    schedule = schedule_of(config, on_root(comm, lambda: custom_text(config)))

    def prove() -> float:
        check(schedule)
        return simulate(schedule).bubble

    return schedule, on_root(comm, prove)


def _build(
    config: Config,
    mesh: Mesh,
    tp: TensorParallel,
    schedule: Schedule,
    bubble: float,
    decoders: list[Decoder],
    store: TokenStore,
    placed: Placed,
    tuning: Tuning | None,
    watch: Watch,
) -> Parts:
    limit_s = config.limits.stall_s
    parameters = {name: p for decoder in decoders for name, p in decoder.named_parameters()}
    is_cut = schedule.placement.home(schedule.placement.stages - 1)[0] != 0  # embedding and head are on two ranks
    shared = "embedding.weight" if config.model.tied and is_cut and mesh.ends.size > 1 else None
    counts = additions(decoders, schedule.actions[mesh.pp.rank])
    fill = initial_values(config.model, config.run.seed, tp)
    optimization = assemble_optimizer(config, mesh, parameters, fill, counts, shared, tp, tuning, watch)
    for decoder in decoders:
        decoder.presence = optimization.optimizer.presence
    link = _link(config, mesh, tp, schedule.placement, placed.device, tuning, watch)
    return Parts(
        config=config,
        mesh=mesh,
        tp=tp,
        store=store,
        placed=placed,
        samples=_samples(config, mesh, store, placed.device),
        schedule=schedule,
        bubble=bubble,
        parameters=parameters,
        shared=shared,
        has_loss=decoders[-1].span.has_head and tp.rank == 0,
        optimization=optimization,
        loss_scale=make_loss_scale(config),
        engine=Engine([Chunk(decoder) for decoder in decoders], link, optimization.gradients.added),
        control=Waits(limit_s, watch=watch),
        watch=watch,
    )


def _samples(config: Config, mesh: Mesh, store: TokenStore, device: torch.device) -> Samples:
    data, tokens = config.data, store.tokens("train")
    share = data.global_batch // mesh.dp.size
    return Samples(
        tokens=tokens,
        sampler=Sampler(sample_count(len(tokens), data.sequence_length), config.run.seed),
        sequence=data.sequence_length,
        share=share,
        first=mesh.dp.rank * share,
        global_batch=data.global_batch,
        microbatches=config.pipeline.microbatches,
        device=device,
    )


def _tensor_parallel(config: Config, mesh: Mesh, tuning: Tuning | None, watch: Watch) -> TensorParallel:
    """Collective over mesh.tp."""
    group = group_of(mesh.tp)
    group.wire.waits = Waits(config.limits.stall_s, watch=watch)
    use_tuning(group, tuning)
    for each in (group, group.background(LANE)) if group.size > 1 else ():
        prepare(each)  # while no other thread makes windows
    largest = math.prod(_hidden_shape(config, mesh))
    codec = traffic_codecs(config.communication)["tensor"]
    codec = link_codec(codec, largest, group.nodes == 1, tuning, _name(compute_dtype(config)))
    return tensor_parallel(group, config.mesh.sequence_parallel, codec)


def _hidden_shape(config: Config, mesh: Mesh) -> tuple[int, int, int]:
    """(samples of a microbatch, sequence, hidden), whether or not tp splits the sequence."""
    size = config.data.global_batch // mesh.dp.size // config.pipeline.microbatches
    return size, config.data.sequence_length, config.model.hidden


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _link(
    config: Config,
    mesh: Mesh,
    tp: TensorParallel,
    placement: Placement,
    device: torch.device,
    tuning: Tuning | None,
    watch: Watch,
) -> Link:
    size, sequence, hidden = _hidden_shape(config, mesh)
    shape = (size, sequence // tp.parts, hidden)
    dtype = compute_dtype(config)
    codecs: Codecs = {}
    measured = tuning if device.type == "cpu" else None  # of the CPU's codecs
    neighbours = {(mesh.pp.rank + step) % mesh.pp.size for step in (-1, 1)} - {mesh.pp.rank}
    for way, kind in ((FORWARD, "forward"), (BACKWARD, "backward")):
        for peer in neighbours:
            name = traffic_codecs(config.communication)[kind]
            codecs[way, peer] = link_codec(name, math.prod(shape), mesh.shares_node(peer), measured, _name(dtype))
    return Link(mesh, placement, shape, Waits(config.limits.stall_s, watch=watch), codecs, dtype, device)
