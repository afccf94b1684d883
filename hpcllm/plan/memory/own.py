"""What the ranks of our trainer hold with a layout: the same bytes as of_run.py says, found fast enough for a search.

    states and buffers     once for each kind of rank     thousands of layouts share them
    passes                 once for each kind of stage
    schedule               its few moments that can be the largest, once for each (moments.py)

Pure.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from hpcllm.config import Config, DataConfig, PipelineConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.moments import PassUses, peak, usual_moments
from hpcllm.plan.memory.of_run import RankMemory, between_passes, chunk_sizes, pass_uses, target_bytes
from hpcllm.plan.memory.sizes import Sizes
from hpcllm.plan.models import Model
from hpcllm.plan.run_config import config_of
from hpcllm.plan.stages import HALVED, Alike, kinds_of, placement_of, spans_like, stage_spans


def own_memory(model: Model, layout: Layout, global_batch: int) -> tuple[RankMemory, ...]:
    """Of each pipeline rank, the one over tp that holds most. Raises ConfigError for a run that cannot be."""
    config = config_of(model, layout, global_batch)
    spans, placement = stage_spans(model, layout), placement_of(layout)
    sizes, shared = chunk_sizes(config, layout.recompute), _shared(config)
    halved = sizes.with_split(layout.schedule in HALVED)
    found = []
    for rank in range(layout.pp):
        kinds = kinds_of(spans, placement, rank)
        different = list(dict.fromkeys(kinds))
        alike = tuple(different.index(kind) for kind in kinds)
        moments = usual_moments(layout.schedule, layout.pp, config.pipeline.microbatches, rank, alike)
        activations = peak(moments, [_uses(halved, kind) for kind in different], sizes.residual)
        kept = _between_passes(shared, kinds)
        found.append(dataclasses.replace(kept, activations=target_bytes(config) + activations))
    return tuple(found)


def _shared(config: Config) -> Config:
    """Without what only passes ask for."""
    return dataclasses.replace(config, data=DataConfig(), pipeline=PipelineConfig())


@lru_cache(maxsize=1 << 12)
def _between_passes(config: Config, kinds: tuple[Alike, ...]) -> RankMemory:
    return between_passes(config, spans_like(kinds))


@lru_cache(maxsize=1 << 12)
def _uses(sizes: Sizes, kind: Alike) -> PassUses:
    return pass_uses(sizes, spans_like([kind])[0])
