"""Set up one rank from a checked run file: whatever is invalid is rejected here, before any work.

Config --+-- mesh sizes, batch split -----> Mesh, microbatches
         +-- token store -----------------> vocabulary, Sampler
         +-- schedule, spans of layers ---> a Decoder a chunk --> Gradients, Optimizer, Engine
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.base import read_base
from hpcllm.checkpoint.huggingface.start import take_model
from hpcllm.checkpoint.state import Residuals, Shards, find_residuals
from hpcllm.checkpoint.writer import check_writer
from hpcllm.collectives import group_of, prepare
from hpcllm.collectives.selection import link_codec
from hpcllm.collectives.tuning import Tuning, load_tuning
from hpcllm.config.schema import Config, traffic_codecs
from hpcllm.data.loader import Samples
from hpcllm.data.store import TokenStore, open_store
from hpcllm.model.compiled import check_compiler, compile_blocks
from hpcllm.model.gradient_sums import has_wide_products
from hpcllm.model.initialisation import allocate_chunks, initial_values
from hpcllm.model.quantised import QuantisedWeight
from hpcllm.model.shapes import parameter_shapes, trained_shapes
from hpcllm.model.tensor_parallel import LANE, TensorParallel, tensor_parallel, traffic
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.mesh import Mesh, open_mesh
from hpcllm.mpi.mesh_axes import describe_rank
from hpcllm.mpi.wait import Waits, job_waits
from hpcllm.mpi.watchdog import Watchdog, open_watchdog
from hpcllm.optim.buckets import Gradients
from hpcllm.optim.optimizer import KINDS, Optimization, Optimizer, make_optimization
from hpcllm.pipeline.actions import Placement
from hpcllm.pipeline.chunk import Chunk, additions
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.host_activations import HostActivations
from hpcllm.pipeline.link import BACKWARD, FORWARD, Codecs, Link
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.resolve import resolve
from hpcllm.system.device import torch_dtype
from hpcllm.system.device_setup import DeviceSetup, set_up_device
from hpcllm.system.hardware.pci_devices import find_nics, wire_gb_s
from hpcllm.training.log import Traffic
from hpcllm.training.objective import NEXT_TOKEN, Objective
from hpcllm.training.step import LossScale, make_loss_scale
from hpcllm.training.trackers import check_trackers


@dataclass(frozen=True)
class RunContext:
    """All that one rank trains with. Plain values; loop.py brings them together."""

    config: Config  # vocabulary and dp filled in
    mesh: Mesh
    tp: TensorParallel
    tuning: Tuning | None  # rates by which `auto` decides
    store: TokenStore
    device_setup: DeviceSetup
    objective: Objective
    loader: Samples
    schedule: Schedule  # checked
    bubble: float  # share of a step that it lets a rank idle, if a backward pass takes twice a forward pass
    parameters: dict[str, torch.nn.Parameter]  # of this rank that are trained, in the order of the model
    frozen: dict[str, torch.nn.Parameter]  # the others, where adapters are trained
    quantised: dict[str, QuantisedWeight]  # those of them that are held in 8 or 4 bits
    base: str  # fingerprint of the weights that those were read from; empty if there are none
    shared: str | None  # the parameter of which the other end of the pipeline has a copy
    optimization: Optimization
    loss_scale: LossScale
    engine: Engine
    control: Waits  # for sums over all ranks between the passes
    watchdog: Watchdog

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters that this rank answers for: a shared embedding belongs to the first stage."""
        is_copy = self.mesh.pp.rank > 0
        return frozenset(name for name in self.parameters if not (is_copy and name == self.shared))

    @property
    def device(self) -> torch.device:
        return self.device_setup.device

    @property
    def gradients(self) -> Gradients:
        return self.optimization.gradients

    @property
    def optimizer(self) -> Optimizer:
        return self.optimization.optimizer

    @property
    def run_folder(self) -> Path:
        return Path(self.config.run.folder) / self.config.run.name

    @property
    def shards(self) -> Shards:
        """Shapes of the global tensors and this rank's place in tp, for checkpoints."""
        shapes = trained_shapes(self.config.model, self.config.finetuning.adapter)
        return Shards(shapes, self.mesh.tp.rank, self.mesh.tp.size)

    def residuals(self) -> Residuals | None:
        """Residuals of error feedback, None if there are none. Collective over the mesh."""
        return find_residuals(self.optimizer.residuals(), self.mesh.world)

    def traffic(self) -> Traffic:
        """Seconds waited and bytes sent so far by this rank, in the order of log.TRAFFIC."""
        link, worker, wires = self.engine.link, self.optimization.worker, self.optimization.wires
        tensor_s, *tensor_bytes = traffic(self.tp)
        exposed_s = link.waits.total_s + worker.exposed_s + tensor_s
        shared = [count for kind in KINDS for count in (wires[kind].plain_bytes, wires[kind].sent_bytes)]
        ways = [count[way] for way in (FORWARD, BACKWARD) for count in (link.plain_bytes, link.sent_bytes)]
        return np.array([exposed_s, worker.hidden_s, *shared, *ways, *tensor_bytes])


@contextmanager
def open_run(config: Config, comm: MPI.Intracomm, objective: Objective = NEXT_TOKEN) -> Iterator[RunContext]:
    """Make everything that this rank trains with, with initial weights. Collective over comm. Raises UserError."""
    assert config.finetuning.kind in objective.kinds, f"not the objective of finetuning.kind = {config.finetuning.kind}"
    check_writer(config.checkpoint.writer)
    on_root(comm, lambda: check_trackers(config.log.trackers))
    if config.model.compile:
        on_root(comm, check_compiler)
    resolved = resolve(take_model(config, comm), comm.size, partial(on_root, comm))
    bubble = on_root(comm, lambda: resolved.bubble)
    config, store = open_store(resolved.config, comm)
    schedule, placement = resolved.schedule, resolved.schedule.placement
    tuning_file = config.communication.tuning
    tuning = on_root(comm, lambda: load_tuning(tuning_file)) if tuning_file else None
    place = partial(describe_rank, ranks=comm.size, config=config.mesh)
    with open_mesh(comm, config.mesh) as mesh, open_watchdog(mesh.world, place) as watchdog, job_waits.patient():
        device_setup = set_up_device(config, mesh)
        tp = _tensor_parallel(config, mesh, tuning, watchdog)
        adapter = config.finetuning.adapter
        stages = [placement.stage(mesh.pp.rank, chunk) for chunk in range(placement.chunks)]
        decoders = allocate_chunks(
            config.model,
            [resolved.spans[stage] for stage in stages],
            tp,
            torch_dtype(config.precision.compute),
            device_setup.device,
            bare=True,
            adapter=adapter,
        )
        for stage, decoder in zip(stages, decoders, strict=True):
            decoder.recompute = resolved.recompute[stage]
            decoder.loss_tokens = config.pipeline.loss_tokens
        if config.model.compile:
            compile_blocks(decoders)
        named = {name: p for decoder in decoders for name, p in decoder.named_parameters()}
        parameters = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        quantised = {name: weight for decoder in decoders for name, weight in decoder.quantised.items()}
        base = _read_base(config, frozen, quantised, mesh) if adapter.rank else ""
        is_cut = placement.home(placement.stages - 1)[0] != 0  # embedding and head are on two ranks
        is_shared = config.model.tied and is_cut and mesh.ends.size > 1 and "embedding.weight" in parameters
        shared = "embedding.weight" if is_shared else None
        counts = additions(decoders, schedule.actions[mesh.pp.rank])
        fill = initial_values(config.model, config.run.seed, tp, adapter)
        optimization = make_optimization(config, mesh, parameters, fill, counts, shared, tp, tuning, watchdog)
        has_wide_products(device_setup.device.type, torch_dtype(config.precision.compute))  # asked now, not in a pass
        for decoder in decoders:
            decoder.unshard_hooks = optimization.optimizer.weights
            decoder.gradient_sums = optimization.gradients
        link = _link(config, mesh, tp, placement, device_setup.device, tuning, watchdog)
        if device_setup.device.type != "cpu":  # there alone are messages held: they start in this wait, too
            optimization.worker.meanwhile = link.advance
        stays = [*named.values(), *(weight.data for weight in quantised.values())]
        host = HostActivations(device_setup.device, stays) if config.pipeline.offload else None
        yield RunContext(
            config=config,
            mesh=mesh,
            tp=tp,
            tuning=tuning,
            store=store,
            device_setup=device_setup,
            objective=objective,
            loader=objective.open_samples(config, mesh, store, device_setup.device),
            schedule=schedule,
            bubble=bubble,
            parameters=parameters,
            frozen=frozen,
            quantised=quantised,
            base=base,
            shared=shared,
            optimization=optimization,
            loss_scale=make_loss_scale(config),
            engine=Engine([Chunk(decoder, host) for decoder in decoders], link, optimization.gradients.added),
            control=Waits(config.limits.stall_s, observer=watchdog),
            watchdog=watchdog,
        )
        optimization.close()


def _read_base(
    config: Config,
    frozen: Mapping[str, torch.nn.Parameter],
    quantised: Mapping[str, QuantisedWeight],
    mesh: Mesh,
) -> str:
    """Fill the frozen weights from run.start_from; returns its fingerprint. Collective over the mesh."""
    shards = Shards(parameter_shapes(config.model), mesh.tp.rank, mesh.tp.size)
    tensors = {name: parameter.detach() for name, parameter in frozen.items()}
    return read_base(Path(config.run.start_from), tensors, quantised, shards, mesh.world)


def _tensor_parallel(config: Config, mesh: Mesh, tuning: Tuning | None, watchdog: Watchdog) -> TensorParallel:
    """Make the group of the ranks that split layers, and its codec. Collective over mesh.tp."""
    group = group_of(mesh.tp)
    # sums of three ranks or more in a library's own order would differ in bits from MPI to MPI
    group.wire.waits = Waits(config.limits.stall_s, observer=watchdog, foreground=group.size <= 2)
    group.use_tuning(tuning)
    for each in (group, group.background(LANE)) if group.size > 1 else ():
        prepare(each)  # while no other thread makes windows
    largest = math.prod(_hidden_shape(config, mesh))
    codec = traffic_codecs(config.communication)["tensor"]
    if tuning:
        codec = link_codec(codec, largest, group.nodes == 1, tuning, _name(torch_dtype(config.precision.compute)))
    return tensor_parallel(group, config.mesh.sequence_parallel, codec)


def _hidden_shape(config: Config, mesh: Mesh) -> tuple[int, int, int]:
    """Return (samples of a microbatch, sequence, hidden) of a whole sequence, even where tp splits it."""
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
    watchdog: Watchdog,
) -> Link:
    size, sequence, hidden = _hidden_shape(config, mesh)
    shape = (size, sequence // tp.parts, hidden)
    dtype = torch_dtype(config.precision.compute)
    codecs: Codecs = {}
    on_cpu = device.type == "cpu"  # rates are of the CPU's codecs
    wire = on_root(mesh.pp, lambda: wire_gb_s(find_nics())) if on_cpu and tuning is None else None
    neighbours = {(mesh.pp.rank + step) % mesh.pp.size for step in (-1, 1)} - {mesh.pp.rank}
    for way, kind in ((FORWARD, "forward"), (BACKWARD, "backward")):
        for peer in neighbours:
            name = traffic_codecs(config.communication)[kind]
            known = (mesh.shares_node(peer), tuning, _name(dtype), wire)
            codecs[way, peer] = link_codec(name, math.prod(shape), *known) if on_cpu else name
    return Link(mesh, placement, shape, Waits(config.limits.stall_s, observer=watchdog), codecs, dtype, device)
