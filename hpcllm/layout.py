"""Which rank does what: mesh, batch, schedule and layers fit together, or are refused before any work.

ranks = dp x pp x tp         global_batch = dp x microbatches x size
schedule: pp x chunks virtual stages  <-->  spans of the model's layers, one a virtual stage, and how each recomputes
a layer: heads, key and value heads, ffn channels in tp equal parts; the vocabulary in tp parts of any size
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from hpcllm.axes import mesh_sizes
from hpcllm.config import Config
from hpcllm.errors import MeshError, ScheduleError
from hpcllm.model.shapes import StageSpan, cut_layers, split_layers
from hpcllm.pipeline.placement import Placement
from hpcllm.pipeline.schedules import Schedule, make_schedule, read_schedule
from hpcllm.rules import divisors


def check_layout(config: Config, ranks: int) -> Config:
    """The config with dp filled in. Raises MeshError if ranks, mesh, model and batch do not fit together."""
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


def _check_split(config: Config) -> None:
    """That tp divides what it has to."""
    model, tp = config.model, config.mesh.tp
    sizes = {"model.heads": model.heads, "model.ffn": model.ffn}
    if model.kv_heads:
        sizes["model.kv_heads"] = model.kv_heads
    if config.mesh.sequence_parallel:
        sizes["data.sequence_length"] = config.data.sequence_length
    for key, size in sizes.items():
        if size % tp:
            told = ", ".join(f"{key} = {size}" for key, size in sizes.items())
            raise MeshError(
                f"mesh.tp = {tp} does not divide {key} = {size}; valid tp with {told}: "
                f"{divisors(math.gcd(*sizes.values()))}; or make {key} a multiple of {tp}"
            )


def check_vocabulary(config: Config) -> None:
    """That each tp rank gets a part of the vocabulary, which the store may have said. Raises MeshError."""
    if config.model.vocabulary < config.mesh.tp:
        raise MeshError(
            f"mesh.tp = {config.mesh.tp} is more than the {config.model.vocabulary} tokens of the vocabulary, which "
            f"it splits; valid: 1 to {config.model.vocabulary}"
        )


def recompute_of(config: Config, placement: Placement) -> list[str]:
    """What each virtual stage makes again in its backward pass. Raises MeshError if the words are not as many."""
    words = config.pipeline.recompute.split(",")
    if len(words) not in (1, placement.stages):
        raise MeshError(
            f"pipeline.recompute = {config.pipeline.recompute!r} has {len(words)} words, but mesh.pp = "
            f"{placement.ranks} with {placement.chunks} chunk{'s' if placement.chunks > 1 else ''} a rank is "
            f"{_stages(placement.stages)}; valid: one word for all, or {placement.stages}"
        )
    return words * placement.stages if len(words) == 1 else words


def custom_text(config: Config) -> str:
    """The text of pipeline.file, if the run file names one. Raises ScheduleError."""
    file = config.pipeline.file
    try:
        return Path(file).read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read pipeline.file = {file!r}: {error}") from error


def schedule_of(config: Config, custom: str) -> Schedule:
    """The schedule of all ranks of a pipeline, not yet checked. custom: the text of pipeline.file, if there is one.

    Raises ScheduleError if the schedule does not exist in this shape, or the text is of another shape than the run.
    """
    pipeline, ranks = config.pipeline, config.mesh.pp
    if pipeline.schedule != "custom":
        return make_schedule(pipeline.schedule, ranks, pipeline.microbatches, pipeline.chunks or None)
    schedule = read_schedule(custom)
    placement = schedule.placement
    shapes = [
        ("mesh.pp", ranks, placement.ranks),
        ("pipeline.microbatches", pipeline.microbatches, schedule.microbatches),
        ("pipeline.chunks", pipeline.chunks or placement.chunks, placement.chunks),
    ]
    for key, asked, found in shapes:
        if asked != found:
            raise ScheduleError(
                f"{key} = {asked}, but the schedule in {pipeline.file!r} is for {found}; set {key}={found}"
            )
    return schedule


def spans_of(config: Config, placement: Placement) -> list[StageSpan]:
    """The layers of each virtual stage. Raises MeshError if there are too few, or pipeline.layers does not fit."""
    layers, sizes = config.model.layers, config.pipeline.layers
    asked = f"mesh.pp = {placement.ranks} with {placement.chunks} chunk{'s' if placement.chunks > 1 else ''} a rank"
    if placement.stages > layers:
        most = layers // placement.chunks
        valid = f"mesh.pp from 1 to {most}" if most else f"pipeline.chunks from 1 to {layers}"
        raise MeshError(
            f"{asked} is {placement.stages} stages, but model.layers = {layers}, and each takes one layer at least; "
            f"valid: {valid}, or model.layers >= {placement.stages}"
        )
    if not sizes:
        return split_layers(config.model, placement.stages)
    if len(sizes) != placement.stages:
        raise MeshError(
            f"pipeline.layers = {list(sizes)} names {_stages(len(sizes))}, but {asked} is {placement.stages}; "
            f"valid: {placement.stages} numbers that add up to model.layers = {layers}"
        )
    return cut_layers(sizes)


def _stages(count: int) -> str:
    return f"{count} stage{'s' if count > 1 else ''}"
