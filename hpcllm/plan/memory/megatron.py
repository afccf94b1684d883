"""Predict what the ranks of Megatron-LM, Megatron-DeepSpeed, FSDP and their kin hold with a layout.

    bytes a parameter                 weights   gradients   optimizer     of n parameters of a rank
    fp16, none or states              2         2           12            moments and master weights in float32
    bf16, none                        2         4           12            Megatron-LM adds gradients up in float32
    bf16, states, GPT's shape         2         2 + 4       12 / dp       DeepSpeed's BF16_Optimizer: both kinds
    bf16, states, Llama's shape       2         2           12 / dp       as the layouts of arXiv:2311.05610 ask for
    16 bit, states+gradients          2         2 / dp      12 / dp       ZeRO 2, and a bucket of gradients
    16 bit, all                       2 / dp    2 / dp      12 / dp       ZeRO 3 and FSDP, and the blocks at work, whole

Activations of a microbatch, at the fullest point of the schedule (peak_points.py):

    x --norm--> [q k v] --scores--> [output] --> + --norm--> [up, gate] --act--> [down] --> +
    r    r       q k k    a s s      q            r     r     f    f     f  f                    kept, "none"
    r    r       q k k               q            r     r     f    f     f  f                          "selective"
    r                                                                                                  "full"

With h = hidden, t = tp, 2 bytes a value and GPT's shape this is Table 2 of arXiv:2205.05198, sbh (10 + 24/t + 5as/ht):
r = 2sbh, 1/t of it with sequence parallelism, q = k = 2sbh/t, f = 8sbh/t; of a score are kept the softmax, what dropout
leaves of it, and dropout's mask. Masks elsewhere: models with LayerNorm are taken to have them, others not.

    backward    gradients of the layer at work, the layer recomputed first where not all was kept
    loss, bytes a logit     Megatron-LM     2 + 4 + 4                 as they come, in float32, softmax; V / t of them
                            Llama's shape   2 + 4 + 4 + 4 + 4 + 2     PyTorch's, on every rank; and gradients of each
                            FSDP            2 + 2                     in place, as LLM-foundry's; no dropout

Which loss belongs to whom was seen from rows that ran out of memory, and rows that did not (perf/plan/memory.md).
Sources: Megatron-LM, docs of the distributed optimizer; arXiv:1910.02054 figure 1; the logs of LUMI's 175B run for
BF16_Optimizer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcllm.config.schema import ModelConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.peak_points import PassUses, layout_points, peak
from hpcllm.plan.memory.sizes import RankMemory, Sizes, Use, layout_sizes
from hpcllm.plan.models import HALVED, Model, StageKind, held_parameters

FLASH = ("flash", "flash1")  # kinds of attention whose scores never leave the chip
BUCKET = 5e8  # elements of DeepSpeed's buckets of gradients and weights, unless told otherwise


def megatron_memory(model: Model, layout: Layout, global_batch: int) -> tuple[RankMemory, ...]:
    """Predict for each pipeline rank, the fullest one over tp. Raises ConfigError if samples do not divide."""
    sizes, shape = layout_sizes(model, layout), model.shape
    message_bytes = sizes.channels(shape.hidden) // layout.tp
    weights, gradients, states = state_bytes(shape, layout)
    found = []
    for kinds, different, points in layout_points(model, layout, layout.microbatches(global_batch), range(layout.pp)):
        uses = [megatron_uses(sizes, layout, kind) for kind in different]
        n = held_parameters(shape, kinds, layout.tp)
        updated = n / (1 if layout.shard == "none" else layout.dp)
        copies = 4 * updated if layout.precision == "fp16" else 0.0  # of gradients in float32, for AdamW
        several = [point.held for point in points if sum(point.held) > 1]
        kept = [sum(count * use.forward.net for count, use in zip(held, uses, strict=True)) for held in several]
        memory = RankMemory(
            parameters=weights * (updated if layout.shard == "all" else n),
            gradients=gradients * (n if layout.shard in ("none", "states") else updated),
            optimizer=states * updated,
            activations=max(peak(points, uses, message_bytes), copies),
            buffers=_buffers(shape, layout, kinds, n),
            by_turns=max(kept, default=0),
        )
        found.append(memory)
    return tuple(found)


def state_bytes(shape: ModelConfig, layout: Layout) -> tuple[int, int, int]:
    """Return the bytes of a parameter's weight, gradient and optimizer states, before anything is shared over dp."""
    weights, states = layout.item_bytes, 8 if layout.precision == "fp32" else 12
    if layout.gradient_bytes:
        return weights, layout.gradient_bytes, states
    if layout.precision != "bf16" or layout.shard in ("states+gradients", "all"):
        return weights, weights, states
    if layout.shard == "none":
        return weights, 4, states
    return weights, 2 if has_torch_stack(shape) else 2 + 4, states


def _buffers(shape: ModelConfig, layout: Layout, kinds: Sequence[StageKind], n: float) -> float:
    """Return the bytes of gradients on their way; of gathered weights, two blocks and all else; their gradients."""
    if layout.shard == "states+gradients":
        return min(n, BUCKET) * layout.item_bytes
    if layout.shard != "all":
        return 0.0
    block = held_parameters(shape, ((1, False, False),), layout.tp)
    ends = n - block * sum(blocks for blocks, _, _ in kinds)
    return layout.item_bytes * (3 * block + 2 * ends)


def megatron_uses(s: Sizes, layout: Layout, kind: StageKind) -> PassUses:
    """Count the passes of a microbatch through a virtual stage. Two backward halves keep all until the second."""
    (blocks, has_embedding, has_head), (logits, loss) = kind, _loss(s, layout)
    loss += s.gathered
    kept = blocks * layer_kept(s, layout) + has_embedding * _mask(s, layout) + has_head * (2 * s.residual + logits)
    forward = max(_forward_temporary(s, layout), has_head * loss)
    backward = max(
        layer_at_work(s, layout),
        has_head * loss + s.residual,
        has_embedding * (s.weights(s.vocabulary) + s.residual),
    )
    if layout.schedule in HALVED:
        return PassUses(Use(kept + forward, kept), Use(backward, 0), Use(0, -kept))
    return PassUses(Use(kept + forward, kept), Use(backward, -kept), Use(0, 0))


def layer_kept(s: Sizes, layout: Layout) -> int:
    """Return the bytes that one layer keeps from its forward pass to its backward pass."""
    if layout.recompute == "full":
        return s.residual
    scores = 0 if layout.recompute == "selective" else _scores_kept(s, layout)
    return _attention_kept(s, layout) + scores + _feed_forward_kept(s, layout)


def layer_at_work(s: Sizes, layout: Layout) -> int:
    """Return the bytes besides those kept of the layer whose backward pass runs: recomputed tensors and gradients."""
    feed_forward = _feed_forward_kept(s, layout) + s.residual  # and the output behind it
    attention = _scores_at_work(s, layout)
    gradients = 2 * s.residual + 2 * s.gathered
    if layout.recompute == "full":
        recomputed = _attention_kept(s, layout) - s.residual + _scores_kept(s, layout)
        return recomputed + max(feed_forward, attention) + gradients
    if layout.recompute == "selective":
        attention += _scores_kept(s, layout)
    of_product = (3 if s.model.activation == "swiglu" else 2) * s.ffn  # its gradient, and those of its factors
    return max(of_product, attention - feed_forward) + gradients


def _norm_kept(s: Sizes, layout: Layout) -> int:
    """Return the bytes a norm keeps: its input; of many kernels, the input in float32 and the factor of its weights."""
    return s.residual if layout.norm != "unfused" else 2 * s.as_float32(s.residual)


def _mask(s: Sizes, layout: Layout) -> int:
    """Return the bytes of dropout's mask on the residual stream, one a value."""
    return s.residual // s.item_bytes if s.model.norm == "layernorm" and layout.shard != "all" else 0


def _attention_kept(s: Sizes, layout: Layout) -> int:
    """Return the bytes that attention keeps, without scores."""
    return _norm_kept(s, layout) + s.residual + 2 * s.queries + 2 * s.keys + _mask(s, layout)


def _feed_forward_kept(s: Sizes, layout: Layout) -> int:
    """Return the bytes that the feed-forward network keeps.

    With a gate: input and output of the activation function, the other factor, the product.
    """
    inner = 4 * s.ffn if s.model.activation == "swiglu" else 2 * s.ffn
    return _norm_kept(s, layout) + s.residual + inner + _mask(s, layout)


def _scores_kept(s: Sizes, layout: Layout) -> int:
    if layout.attention in FLASH:
        return s.log_sums
    float32 = 4 if layout.attention == "unfused" else 0  # the softmax itself, of which a copy goes on
    return s.scores * (2 * s.item_bytes + 1 + float32)


def _scores_at_work(s: Sizes, layout: Layout) -> int:
    """Return the bytes of gradients in attention: queries (flash: summed in float32), keys, values; scores, twice."""
    if layout.attention in FLASH:
        return s.queries + s.as_float32(s.queries) + 2 * s.keys
    float32 = 4 if layout.attention == "unfused" else 0
    return 2 * s.scores * (s.item_bytes + float32)


def _forward_temporary(s: Sizes, layout: Layout) -> int:
    """Return the bytes of scores before the softmax, and of what is not kept of a layer that is recomputed later."""
    scores = 0 if layout.attention in FLASH else s.scores * s.item_bytes
    if layout.recompute == "full":
        return s.gathered + 2 * s.residual + max(2 * s.ffn, 2 * s.queries + 2 * s.keys + 2 * scores)
    return s.gathered + scores


def has_torch_stack(shape: ModelConfig) -> bool:
    """Return True for Llama's shape, whose trainers in print keep to PyTorch's loss and 16-bit gradients."""
    return shape.activation == "swiglu"


def _loss(s: Sizes, layout: Layout) -> tuple[int, int]:
    """Return the bytes kept of the logits, besides the last norm's, and those needed while the loss is at work."""
    narrow = s.item_bytes if s.item_bytes < 4 else 0
    if layout.shard == "all":
        return s.item_bytes * s.tokens * s.vocabulary, s.item_bytes * s.tokens * s.vocabulary
    if has_torch_stack(s.model):
        return 4 * s.tokens * s.model.vocabulary, (2 * narrow + 12) * s.tokens * s.model.vocabulary
    return 4 * s.tokens * s.vocabulary, (narrow + 4) * s.tokens * s.vocabulary
