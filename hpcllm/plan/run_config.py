"""The run of our trainer that a layout stands for.

    layout + model + samples a step --> Config --> what the trainer refuses, what a rank will hold, a run file
    Config --> layout + model                      a run file that is there is predicted, too

Only what a layout says; the rest is as a run file leaves it. Pure.
"""

from __future__ import annotations

from hpcllm.config import (
    CommunicationConfig,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    check_together,
)
from hpcllm.errors import ConfigError
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model
from hpcllm.policy import TRAFFIC


def config_of(model: Model, layout: Layout, global_batch: int) -> Config:
    """The run, all filled in. Raises ConfigError where its keys do not fit together."""
    config = Config(
        model=model.shape,
        data=DataConfig(sequence_length=model.sequence, global_batch=global_batch),
        mesh=MeshConfig(
            dp=layout.dp, pp=layout.pp, tp=layout.tp, order=layout.order, sequence_parallel=layout.sequence_parallel
        ),
        pipeline=PipelineConfig(
            schedule=layout.schedule,
            microbatches=layout.microbatches(global_batch),
            chunks=layout.chunks,
            recompute=layout.recompute,
        ),
        optimizer=OptimizerConfig(shard=layout.shard),
        precision=PrecisionConfig(compute=layout.precision),
        communication=CommunicationConfig(policy=layout.policy),  # type: ignore[arg-type]
    )
    check_together(config)
    return config


def layout_of(config: Config, chunks: int) -> tuple[Model, Layout]:
    """What the planner times of a run, filled in; chunks: of its schedule. Raises ConfigError for what it does not."""
    pipeline, words = config.pipeline, set(config.pipeline.recompute.split(","))
    chosen = [key for key in TRAFFIC if getattr(config.communication, key)]
    mixed = {
        f"pipeline.schedule = {pipeline.schedule!r}": pipeline.schedule == "custom",
        f"pipeline.recompute = {pipeline.recompute!r}, which differs from stage to stage": len(words) > 1,
        f"pipeline.layers = {list(pipeline.layers)}": bool(pipeline.layers),
        f"communication.{', '.join(chosen)} beside communication.policy": bool(chosen),
    }
    for what, is_so in mixed.items():
        if is_so:
            raise ConfigError(f"the planner has no word for {what}")
    mesh, data = config.mesh, config.data
    layout = Layout(
        dp=mesh.dp,
        pp=mesh.pp,
        tp=mesh.tp,
        micro_batch=data.global_batch // mesh.dp // pipeline.microbatches,
        chunks=chunks,
        schedule=pipeline.schedule,  # type: ignore[arg-type]
        recompute=words.pop(),  # type: ignore[arg-type]
        shard=config.optimizer.shard,
        sequence_parallel=mesh.sequence_parallel,
        precision=config.precision.compute,
        policy=config.communication.policy,
        order=mesh.order,
    )
    return Model(config.model.preset, config.model, data.sequence_length), layout
