"""Convert layouts to run files of our trainer and back; check that a layout fits a model and a batch.

    layout + model + samples a step --> Config --> what the trainer rejects, what a rank will hold, a run file
    Config --> layout + model                      an existing run file is predicted, too

    checked for both trainers    samples divide over dp, tp divides what it splits, every stage has a layer, the
                                 schedule exists
    trainer=hpcllm               all that our trainer rejects, by its own checks of the run that the layout stands for
    trainer=megatron             weights may be sharded over dp with pipeline stages, too; kernels of many kinds

No schedule is run: those of SCHEDULES run to their end in every shape in which they exist, which tests prove. Keys that
a layout does not have keep their defaults. Pure.
"""

from __future__ import annotations

import dataclasses

from hpcllm.config.policies import TRAFFIC
from hpcllm.config.schema import Config, DataConfig, check_together
from hpcllm.errors import ConfigError
from hpcllm.pipeline.schedules import make_placement
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model
from hpcllm.plan.resolve import check_layout, check_vocabulary, layer_spans

KEYS = {  # table of a run file -> key of a layout -> its name in the table
    "mesh": {key: key for key in ("dp", "pp", "tp", "order", "sequence_parallel")},
    "pipeline": {"schedule": "schedule", "chunks": "chunks", "recompute": "recompute"},
    "optimizer": {"shard": "shard"},
    "precision": {"precision": "compute"},
    "communication": {"policy": "policy"},
}
OURS_ALONE = {"attention": "flash", "norm": "usual", "gradient_bytes": 0}  # keys of which our trainer has one value


def config_of(model: Model, layout: Layout, global_batch: int) -> Config:
    """Make the run file of a layout, all filled in. Raises ConfigError where its keys do not fit together."""
    config, values = Config(), {"pipeline": {"microbatches": layout.microbatches(global_batch)}}
    for title, keys in KEYS.items():
        values.setdefault(title, {}).update({name: getattr(layout, key) for key, name in keys.items()})
    parts = {title: dataclasses.replace(getattr(config, title), **table) for title, table in values.items()}
    data = DataConfig(sequence_length=model.sequence, global_batch=global_batch)
    config = dataclasses.replace(config, model=model.shape, data=data, **parts)
    check_together(config)
    return config


def layout_of(config: Config, chunks: int) -> tuple[Model, Layout]:
    """Make the layout of a run, filled in. chunks: of its schedule. Raises ConfigError for keys it cannot express."""
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
    values = {key: getattr(getattr(config, title), name) for title, keys in KEYS.items() for key, name in keys.items()}
    micro_batch = config.data.global_batch // config.mesh.dp // pipeline.microbatches
    layout = Layout(**values | {"chunks": chunks, "recompute": words.pop(), "micro_batch": micro_batch})
    return Model(config.model.preset, config.model, config.data.sequence_length), layout


def check_fit(model: Model, layout: Layout, global_batch: int) -> None:
    """Raise UserError (ConfigError, MeshError, ScheduleError) with key, value and valid ones unless all fits."""
    if layout.trainer == "hpcllm":
        for key, value in OURS_ALONE.items():
            if getattr(layout, key) != value:
                raise ConfigError(
                    f"layout.{key} = {getattr(layout, key)!r} with trainer=hpcllm, which has only {value!r}; valid: "
                    f"{key}={value}, or trainer=megatron"
                )
    ours = layout if layout.trainer == "hpcllm" else dataclasses.replace(layout, shard="none")
    config = config_of(model, ours, global_batch)
    check_layout(config, layout.devices)
    check_vocabulary(config)
    placement = make_placement(layout.schedule, layout.pp, config.pipeline.microbatches, layout.chunks)
    layer_spans(config, placement)
