"""Which part of the model each virtual stage of a layout has, and how much of it a rank holds.

    trainer=hpcllm      blocks divided by what they cost, the head counted (model/shapes.py)
    trainer=megatron    as many blocks as others, the last stage what is left: 70 over 8 is 9 9 9 9 9 9 9 7. Where
                        the head is large, embedding and head count as a block each, if that divides: 70 over 12 is
                        5 6 6 6 6 6 6 6 6 6 6 5

Stages that are alike are counted once. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from hpcllm.config import ModelConfig
from hpcllm.model.shapes import StageSpan, cut_layers, head_in_blocks, split_layers
from hpcllm.model.shards import split_sizes
from hpcllm.pipeline.placement import Placement
from hpcllm.pipeline.schedules import SCHEDULES
from hpcllm.plan.layouts import Layout, Schedule
from hpcllm.plan.models import Model

LARGE_HEAD = 0.5  # blocks: BLOOM (1.5) and Llama 3 405B (0.7) were cut so, GPT of 175B with 50k tokens (0.3) was not
Alike = tuple[int, bool, bool]  # stages with as many blocks, with or without embedding and head, are alike
HALVED: tuple[Schedule, ...] = ("zb-h1", "zb-v")  # schedules whose backward pass comes in two halves


def placement_of(layout: Layout) -> Placement:
    kind = SCHEDULES[layout.schedule].placement
    return Placement(layout.pp, layout.chunks, kind.kind)


def stage_spans(model: Model, layout: Layout) -> tuple[StageSpan, ...]:
    """The blocks of each virtual stage."""
    return tuple(_cut(model.shape, layout.pp * layout.chunks, layout.trainer == "hpcllm"))


@lru_cache(maxsize=1 << 10)
def _cut(shape: ModelConfig, stages: int, by_cost: bool) -> list[StageSpan]:
    if by_cost:
        return split_layers(shape, stages)
    layers = shape.layers
    if (layers + 2) % stages == 0 and stages > 1 and head_in_blocks(shape) > LARGE_HEAD:
        each = (layers + 2) // stages
        return cut_layers([each - (stage in (0, stages - 1)) for stage in range(stages)])
    most = math.ceil(layers / stages)
    last = layers - most * (stages - 1)
    if last > 0:
        return cut_layers([most] * (stages - 1) + [last])
    return cut_layers([layers // stages + (stage < layers % stages) for stage in range(stages)])


@lru_cache(maxsize=1 << 10)
def homes_of(placement: Placement) -> tuple[int, ...]:
    """The pipeline rank of each virtual stage."""
    return tuple(placement.home(stage)[0] for stage in range(placement.stages))


def alike(span: StageSpan) -> Alike:
    return span.last_block - span.first_block, span.has_embedding, span.has_head


def kinds_of(spans: Sequence[StageSpan], placement: Placement, rank: int) -> tuple[Alike, ...]:
    """Of the chunks of a pipeline rank."""
    return tuple(alike(spans[placement.stage(rank, chunk)]) for chunk in range(placement.chunks))


def spans_like(kinds: Sequence[Alike]) -> list[StageSpan]:
    """Spans of these kinds, one behind the other."""
    ends = itertools.accumulate(blocks for blocks, _, _ in kinds)
    return [StageSpan(end - kind[0], end, *kind[1:]) for end, kind in zip(ends, kinds, strict=True)]


@lru_cache(maxsize=1 << 12)
def held_parameters(shape: ModelConfig, kinds: tuple[Alike, ...], tp: int) -> float:
    """Elements that the ranks of one pipeline rank hold; the most of any over tp. Every stage has a block at least."""
    ends = spans_like([(1, has_embedding, has_head) for _, has_embedding, has_head in kinds])
    more = sum(blocks for blocks, _, _ in kinds) - len(kinds)
    block = sum(split_sizes(shape, [StageSpan(0, 1, False, False)], tp).values())
    return float(sum(split_sizes(shape, ends, tp).values()) + more * block)
