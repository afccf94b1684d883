"""What the ranks of Megatron-LM, Megatron-DeepSpeed, FSDP and their kin hold with a layout.

    bytes a parameter                 weights   gradients   optimizer     of n parameters of a rank
    fp16, none or states              2         2           12            moments and master weights in float32
    bf16, none                        2         4           12            Megatron-LM adds gradients up in float32
    bf16, states, GPT's shape         2         2 + 4       12 / dp       DeepSpeed's BF16_Optimizer: both kinds
    bf16, states, Llama's shape       2         2           12 / dp       as the layouts of arXiv:2311.05610 ask for
    16 bit, states+gradients          2         2 / dp      12 / dp       ZeRO 2, and a bucket of gradients
    16 bit, all                       2 / dp    2 / dp      12 / dp       ZeRO 3 and FSDP, and the blocks at work, whole

Activations: megatron_passes.py, at the fullest moment of the schedule (moments.py). Sources: Megatron-LM, docs of the
distributed optimizer; arXiv:1910.02054 figure 1; the logs of LUMI's 175B run for BF16_Optimizer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.config import ModelConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.megatron_passes import has_torch_stack, megatron_uses
from hpcllm.plan.memory.moments import Moment, PassUses, peak, usual_moments
from hpcllm.plan.memory.sizes import Sizes
from hpcllm.plan.models import Model
from hpcllm.plan.stages import Alike, held_parameters, kinds_of, placement_of, stage_spans

BUCKET = 5e8  # elements of DeepSpeed's buckets of gradients and weights, unless told otherwise


@dataclass(frozen=True)
class TheirMemory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    by_turns: float  # of activations: what is kept of several microbatches, which come and go by turns


def megatron_memory(model: Model, layout: Layout, global_batch: int) -> tuple[TheirMemory, ...]:
    """Of each pipeline rank, the one over tp that holds most. Raises ConfigError if samples do not divide."""
    spans, placement, sizes = stage_spans(model, layout), placement_of(layout), _sizes(model, layout)
    microbatches, message_bytes = layout.microbatches(global_batch), sizes.channels(model.shape.hidden) // layout.tp
    found = []
    for rank in range(layout.pp):
        kinds = kinds_of(spans, placement, rank)
        different = list(dict.fromkeys(kinds))
        alike = tuple(different.index(kind) for kind in kinds)
        moments = usual_moments(layout.schedule, layout.pp, microbatches, rank, alike)
        uses = [megatron_uses(sizes, layout, kind) for kind in different]
        passes = peak(moments, uses, message_bytes)
        found.append(_rank(model.shape, layout, kinds, passes, _by_turns(moments, uses)))
    return tuple(found)


def _by_turns(moments: Sequence[Moment], uses: Sequence[PassUses]) -> int:
    """Bytes kept of microbatches where there are several at once."""
    several = [moment.held for moment in moments if sum(moment.held) > 1]
    return max((sum(n * use.forward.net for n, use in zip(held, uses, strict=True)) for held in several), default=0)


def _sizes(model: Model, layout: Layout) -> Sizes:
    return Sizes(
        model=model.shape,
        samples=layout.micro_batch,
        sequence=model.sequence,
        vocabulary=-(-model.shape.vocabulary // layout.tp),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        item_bytes=layout.item_bytes,
    )


def _rank(shape: ModelConfig, layout: Layout, kinds: tuple[Alike, ...], passes: int, by_turns: int) -> TheirMemory:
    n = held_parameters(shape, kinds, layout.tp)
    weights, gradients, states = state_bytes(shape, layout)
    updated = n / (1 if layout.shard == "none" else layout.dp)
    copies = 4 * updated if layout.precision == "fp16" else 0.0  # of gradients in float32, for AdamW
    return TheirMemory(
        parameters=weights * (updated if layout.shard == "all" else n),
        gradients=gradients * (n if layout.shard in ("none", "states") else updated),
        optimizer=states * updated,
        activations=max(passes, copies),
        buffers=_buffers(shape, layout, kinds, n),
        by_turns=by_turns,
    )


def state_bytes(shape: ModelConfig, layout: Layout) -> tuple[int, int, int]:
    """Bytes of a parameter's weight, gradient and optimizer states, before anything is shared out."""
    weights, states = layout.item_bytes, 8 if layout.precision == "fp32" else 12
    if layout.gradient_bytes:
        return weights, layout.gradient_bytes, states
    if layout.precision != "bf16" or layout.shard in ("states+gradients", "all"):
        return weights, weights, states
    if layout.shard == "none":
        return weights, 4, states
    return weights, 2 if has_torch_stack(shape) else 2 + 4, states


def _buffers(shape: ModelConfig, layout: Layout, kinds: Sequence[Alike], n: float) -> float:
    """Gradients on their way; weights gathered for a while, of two blocks and of what is no block; their gradients."""
    if layout.shard == "states+gradients":
        return min(n, BUCKET) * layout.item_bytes
    if layout.shard != "all":
        return 0.0
    block = _block_parameters(shape, layout.tp)
    ends = n - block * sum(blocks for blocks, _, _ in kinds)
    return layout.item_bytes * (3 * block + 2 * ends)


@lru_cache(maxsize=256)
def _block_parameters(shape: ModelConfig, tp: int) -> float:
    return held_parameters(shape, ((1, False, False),), tp)
