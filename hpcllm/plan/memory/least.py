"""What a rank of our trainer needs at least with a layout, told fast: a search leaves alone what cannot fit.

    between steps    weights, gradients, optimizer: the mean of all ranks
    in a step        blocks of the emptiest stage x what a block keeps x microbatches that rank 0 holds at once

Embeddings, buffers and what passes take for a while are not counted. own_memory.py has all of it. Pure.
"""

from __future__ import annotations

from functools import lru_cache

from hpcllm.config import ModelConfig
from hpcllm.model.shapes import StageSpan
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.forward_pass import forward
from hpcllm.plan.memory.sizes import Level, Sizes
from hpcllm.plan.models import Model
from hpcllm.plan.stages import stage_spans

SHARDS = ("none", "states", "states+gradients", "all")  # each shares what the one before does, and more


def least_bytes(model: Model, layout: Layout, global_batch: int) -> float:
    """Of the rank that needs most."""
    return states_bytes(model, layout) + _activation_bytes(model, layout, global_batch)


def states_bytes(model: Model, layout: Layout) -> float:
    """What it keeps from step to step."""
    n = model.parameters / layout.pp / layout.tp
    moments = 8 if layout.precision == "fp32" else 12
    kept = ((layout.item_bytes, "all"), (4, "states+gradients"), (moments, "states"))
    level = SHARDS.index(layout.shard)
    return sum(size * n / (layout.dp if level >= SHARDS.index(shared) else 1) for size, shared in kept)


def _activation_bytes(model: Model, layout: Layout, global_batch: int) -> float:
    blocks = min(span.last_block - span.first_block for span in stage_spans(model, layout))
    one, two = (_kept_bytes(model.shape, model.sequence, _passes(layout), count) for count in (1, 2))
    return _held(layout, layout.microbatches(global_batch)) * (one + (blocks - 1) * (two - one))


_Passes = tuple[int, int, bool, int, Level]


def _passes(layout: Layout) -> _Passes:
    return layout.micro_batch, layout.tp, layout.sequence_parallel, layout.item_bytes, layout.recompute


@lru_cache(maxsize=1 << 12)
def _kept_bytes(shape: ModelConfig, sequence: int, passes: _Passes, blocks: int) -> float:
    """Of a microbatch, by so many blocks."""
    samples, tp, sequence_parallel, item_bytes, level = passes
    sizes = Sizes(
        model=shape,
        samples=samples,
        sequence=sequence,
        vocabulary=shape.vocabulary // tp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        item_bytes=item_bytes,
        level=level,
    )
    return forward(sizes, StageSpan(0, blocks, False, False)).net


def _held(layout: Layout, microbatches: int) -> int:
    """Microbatches in a chunk that rank 0 holds at once: pipeline/orders.py."""
    filling = min(microbatches, layout.pp)
    match layout.schedule:
        case "gpipe":
            return microbatches
        case "interleaved" if layout.chunks > 1:
            warmup = 2 * (layout.pp - 1) + (layout.chunks - 1) * filling
            return min(layout.chunks * microbatches, warmup + 1)
        case "zb-v":  # before its first microbatch comes back
            return min(microbatches + 1, 2 * layout.pp)
    return filling * layout.chunks
