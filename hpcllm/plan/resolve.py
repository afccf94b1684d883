"""Resolve a run file on N ranks: the one answer to whether it is valid. Pure.

train, --dry-run, memory, layout and preflight ask here, plan for each layout that it looks at.

    Config, N ranks --> mesh        ranks = dp x pp x tp, dp filled in; global_batch = dp x microbatches x size
                    --> model       heads, key and value heads, ffn channels in tp equal parts
                    --> vocabulary  the token store's if the run file does not say it; at least one token a tp rank
                    --> schedule    pp x chunks virtual stages, proved free of deadlock
                    --> layers      a span of the model's layers for each virtual stage, and what it recomputes
                    --> ResolvedRun

Whatever does not fit is rejected here, before any work, with the key, its value and what would be valid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcllm.config.input_files import LARGEST_TABLE_BYTES, read_text
from hpcllm.config.rules import MOST_RANKS, divisors
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError, DataError, MeshError, ScheduleError
from hpcllm.model.shapes import StageSpan, cut_layers, split_layers
from hpcllm.mpi.mesh_axes import mesh_sizes
from hpcllm.pipeline.actions import Placement
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.schedules import Schedule, make_schedule, read_schedule
from hpcllm.pipeline.timing import simulate


@dataclass(frozen=True)
class ResolvedRun:
    """A run file as it will be run: everything filled in, its schedule proved."""

    config: Config  # mesh.dp and model.vocabulary filled in
    schedule: Schedule  # of all ranks of a pipeline
    spans: list[StageSpan]  # layers of each virtual stage
    recompute: list[str]  # level of recomputation of each virtual stage: "none", "selective" or "full"

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        mesh = self.config.mesh
        return mesh.dp * mesh.pp * mesh.tp

    @cached_property
    def bubble(self) -> float:
        """Share of a step in which a rank idles if a backward pass takes twice a forward pass."""
        return simulate(self.schedule).bubble


def resolve(
    config: Config, ranks: int | None, once: Callable[[Callable[[], Any]], Any] = lambda call: call()
) -> ResolvedRun:
    """Resolve a run file for a number of ranks; None: dp x pp x tp of its mesh. Raises UserError.

    once: calls what reads a file or takes long; in a job partial(on_root, comm) of collective_errors, and then this is
    collective over comm.
    config: with the model that it starts from (huggingface.start.take_model).
    """
    if ranks is None:
        ranks = max(config.mesh.dp, 1) * config.mesh.pp * config.mesh.tp
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"{ranks} ranks; valid: 1 to {MOST_RANKS}")
    config = check_layout(config, ranks)
    schedule = run_schedule(config, once(lambda: schedule_file_text(config)))
    once(lambda: check(schedule))
    vocabulary = config.model.vocabulary or once(lambda: stored_vocabulary(config))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=vocabulary))
    check_vocabulary(config)
    placement = schedule.placement
    _check_texts(config, placement)
    return ResolvedRun(config, schedule, layer_spans(config, placement), recompute_levels(config, placement))


def check_launch(config: Config, ranks: int) -> None:
    """Reject a launch on a wrong number of ranks, or without its token store, before anything slow is loaded.

    `resolve` checks all. Raises UserError.
    """
    if config.run.start_from:  # the model is not known yet
        mesh_sizes(ranks, config.mesh)
        return
    check_layout(config, ranks)
    if not config.model.vocabulary:
        stored_vocabulary(config)


def check_layout(config: Config, ranks: int) -> Config:
    """Return the config with mesh.dp filled in.

    Raises MeshError if ranks, mesh, model and batch do not fit together.
    """
    _check_split(config)
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


def _check_texts(config: Config, placement: Placement) -> None:
    """Raise MeshError where a run cannot write texts in whole groups to learn from, or not at all."""
    if config.finetuning.kind != "grpo":
        return
    batch, dp, samples = config.data.global_batch, config.mesh.dp, config.finetuning.reward.samples
    if batch // dp % samples:
        raise MeshError(
            f"finetuning.reward.samples = {samples} does not divide the {batch // dp} texts of a replica "
            f"(data.global_batch = {batch} over mesh.dp = {dp}), which writes whole groups; valid: "
            f"{divisors(batch // dp)}, or a global_batch that is a multiple of {samples} x {dp}"
        )
    if placement.chunks > 1:
        raise MeshError(
            f"{_shape(placement)}: with finetuning.kind = 'grpo' texts are written by stages in a row, one a rank; "
            "valid: pipeline.schedule = 'gpipe', '1f1b' or 'zb-h1'"
        )


def _check_split(config: Config) -> None:
    """Raise MeshError unless tp divides all that it splits."""
    model, tp = config.model, config.mesh.tp
    sizes = {"model.heads": model.heads, "model.ffn": model.ffn}
    if model.kv_heads:
        sizes["model.kv_heads"] = model.kv_heads
    if config.mesh.sequence_parallel:
        sizes["data.sequence_length"] = config.data.sequence_length
    for key, size in sizes.items():
        if size % tp:
            all_sizes = ", ".join(f"{key} = {size}" for key, size in sizes.items())
            raise MeshError(
                f"mesh.tp = {tp} does not divide {key} = {size}; valid tp with {all_sizes}: "
                f"{divisors(math.gcd(*sizes.values()))}; or make {key} a multiple of {tp}"
            )


def check_vocabulary(config: Config) -> None:
    """Raise MeshError unless each tp rank gets a part of the vocabulary."""
    if config.model.vocabulary < config.mesh.tp:
        raise MeshError(
            f"mesh.tp = {config.mesh.tp} is more than the {config.model.vocabulary} tokens of the vocabulary, which "
            f"it splits; valid: 1 to {config.model.vocabulary}"
        )


def stored_vocabulary(config: Config) -> int:
    """Size of data.store's vocabulary; no more than the front of the file is read. Raises ConfigError, DataError."""
    from hpcllm.data.store import read_header  # takes time to load, and is not needed where the run file says it

    store = config.data.store
    if not store:
        raise ConfigError("data.store is missing, and model.vocabulary = 0 takes its vocabulary; set one of the two")
    try:
        return read_header(store).vocabulary
    except DataError as error:
        raise DataError(f"{error}; where only a plan is wanted model.vocabulary can be given instead") from error


def recompute_levels(config: Config, placement: Placement) -> list[str]:
    """Level of recomputation of each virtual stage. Raises MeshError if the run file names another number of them."""
    words = config.pipeline.recompute.split(",")
    if len(words) not in (1, placement.stages):
        raise MeshError(
            f"pipeline.recompute = {config.pipeline.recompute!r} has {len(words)} words, but {_shape(placement)}; "
            f"valid: one word for all, or {placement.stages}"
        )
    return words * placement.stages if len(words) == 1 else words


def schedule_file_text(config: Config) -> str:
    """Text of pipeline.file; empty if the run file names none. Raises ScheduleError."""
    file = config.pipeline.file
    try:
        return read_text(file, LARGEST_TABLE_BYTES) if file else ""
    except ValueError as error:
        raise ScheduleError(f"cannot read pipeline.file = {file!r}: {error}") from error


def run_schedule(config: Config, custom: str) -> Schedule:
    """Make the schedule of all ranks of a pipeline, not yet proved. custom: text of pipeline.file, if there is one.

    Raises ScheduleError if the schedule does not exist in this shape, or the text is of another shape than the run.
    """
    pipeline, ranks = config.pipeline, config.mesh.pp
    if pipeline.schedule != "custom":
        return make_schedule(pipeline.schedule, ranks, pipeline.microbatches, pipeline.chunks or None)
    schedule = read_schedule(custom)
    placement = schedule.placement
    shapes = {
        "mesh.pp": (ranks, placement.ranks),
        "pipeline.microbatches": (pipeline.microbatches, schedule.microbatches),
        "pipeline.chunks": (pipeline.chunks or placement.chunks, placement.chunks),
    }
    for key, (wanted, found) in shapes.items():
        if wanted != found:
            raise ScheduleError(
                f"{key} = {wanted}, but the schedule in {pipeline.file!r} is for {found}; set {key}={found}"
            )
    return schedule


def layer_spans(config: Config, placement: Placement) -> list[StageSpan]:
    """Layers of each virtual stage. Raises MeshError if there are too few, or pipeline.layers does not fit."""
    layers, sizes = config.model.layers, config.pipeline.layers
    if placement.stages > layers:
        most = layers // placement.chunks
        valid = f"mesh.pp from 1 to {most}" if most else f"pipeline.chunks from 1 to {layers}"
        raise MeshError(
            f"{_shape(placement)}, but model.layers = {layers}, and each takes one layer at least; "
            f"valid: {valid}, or model.layers >= {placement.stages}"
        )
    if not sizes:
        return split_layers(config.model, placement.stages)
    if len(sizes) != placement.stages:
        raise MeshError(
            f"pipeline.layers = {list(sizes)} names {_counted(len(sizes), 'stage')}, but {_shape(placement)}; "
            f"valid: {placement.stages} numbers that add up to model.layers = {layers}"
        )
    return cut_layers(sizes)


def _shape(placement: Placement) -> str:
    """Write 'mesh.pp = 2 with 1 chunk a rank is 2 stages'."""
    chunks, stages = _counted(placement.chunks, "chunk"), _counted(placement.stages, "stage")
    return f"mesh.pp = {placement.ranks} with {chunks} a rank is {stages}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"
