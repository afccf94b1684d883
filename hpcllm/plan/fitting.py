"""What must fit together before a layout is timed: with a model, with a batch, with whoever trains.

    both trainers       samples divide over dp, tp divides what it splits, every stage has a layer, the schedule exists
    trainer=hpcllm      all that our trainer refuses, said by its own checks of the run that the layout stands for
    trainer=megatron    weights may be sharded over dp with pipeline stages, too; kernels of many kinds

Nothing is run: the schedules of SCHEDULES run to their end in every shape in which they exist, which tests prove. Pure.
"""

from __future__ import annotations

import dataclasses

from hpcllm.errors import ConfigError
from hpcllm.layout import check_layout, check_vocabulary, spans_of
from hpcllm.pipeline.schedules import make_placement
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model
from hpcllm.plan.run_config import config_of

OURS_ALONE = {"attention": "flash", "norm": "usual", "gradient_bytes": 0}  # as our trainer has them


def check_fit(model: Model, layout: Layout, global_batch: int) -> None:
    """Raises UserError (ConfigError, MeshError, ScheduleError) with key, value and what would be valid."""
    if layout.trainer == "hpcllm":
        _check_ours(layout)
    shard = layout.shard if layout.trainer == "hpcllm" else "none"
    config = config_of(model, dataclasses.replace(layout, shard=shard), global_batch)
    check_layout(config, layout.devices)
    check_vocabulary(config)
    placement = make_placement(layout.schedule, layout.pp, config.pipeline.microbatches, layout.chunks)
    spans_of(config, placement)


def _check_ours(layout: Layout) -> None:
    for key, value in OURS_ALONE.items():
        if getattr(layout, key) != value:
            raise ConfigError(
                f"layout.{key} = {getattr(layout, key)!r} with trainer=hpcllm, which has only {value!r}; valid: "
                f"{key}={value}, or trainer=megatron"
            )
