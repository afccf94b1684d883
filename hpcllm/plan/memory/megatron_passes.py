"""What the passes of a microbatch keep and take on a rank of Megatron-LM and its kin, in bytes.

    x --norm--> [q k v] --scores--> [output] --> + --norm--> [up, gate] --act--> [down] --> +
    r    r       q k k    a s s      q            r     r     f    f     f  f                    kept, "none"
    r    r       q k k               q            r     r     f    f     f  f                          "selective"
    r                                                                                                  "full"

With h = hidden, t = tp, 2 bytes a value and GPT's shape this is Table 2 of arXiv:2205.05198, sbh (10 + 24/t + 5as/ht):
r = 2sbh, 1/t of it with sequence parallelism, q = k = 2sbh/t, f = 8sbh/t; of a score are kept the softmax, what dropout
leaves of it, and dropout's mask. Masks elsewhere: models with LayerNorm are taken to have them, others not.

    backward    gradients of the layer at work, the layer made again first where not all was kept
    loss, bytes a logit     Megatron-LM     2 + 4 + 4                 as they come, in float32, softmax; V / t of them
                            Llama's shape   2 + 4 + 4 + 4 + 4 + 2     PyTorch's, on every rank; and gradients of each
                            FSDP            2 + 2                     in place, as LLM-foundry's; no dropout

Which loss belongs to whom was seen from rows that ran out of memory, and rows that did not (perf/plan/memory.md).
Pure.
"""

from __future__ import annotations

from hpcllm.config import ModelConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.ledger import Use
from hpcllm.plan.memory.moments import PassUses
from hpcllm.plan.memory.sizes import Sizes
from hpcllm.plan.stages import HALVED, Alike


def megatron_uses(s: Sizes, layout: Layout, kind: Alike) -> PassUses:
    """Of a virtual stage. A backward pass in two halves keeps all until the second."""
    blocks, has_embedding, has_head = kind
    kept = blocks * layer_kept(s, layout) + has_embedding * _mask(s, layout) + has_head * _head_kept(s, layout)
    forward = max(_forward_temporary(s, layout), has_head * _loss_at_work(s, layout))
    backward = max(
        layer_at_work(s, layout),
        has_head * _loss_at_work(s, layout) + s.residual,
        has_embedding * (s.weights(s.vocabulary) + s.residual),
    )
    if layout.schedule in HALVED:
        return PassUses(Use(kept + forward, kept), Use(backward, 0), Use(0, -kept))
    return PassUses(Use(kept + forward, kept), Use(backward, -kept), Use(0, 0))


def layer_kept(s: Sizes, layout: Layout) -> int:
    """Of one layer, from its forward pass to its backward pass."""
    if layout.recompute == "full":
        return s.residual
    scores = 0 if layout.recompute == "selective" else _scores_kept(s, layout)
    return _attention_kept(s, layout) + scores + _feed_forward_kept(s, layout)


def layer_at_work(s: Sizes, layout: Layout) -> int:
    """Of the layer whose backward pass runs, besides what was kept: what is made again, and gradients."""
    feed_forward = _feed_forward_kept(s, layout) + s.residual  # and the output behind it
    attention = _scores_at_work(s, layout)
    gradients = 2 * s.residual + 2 * s.whole
    if layout.recompute == "full":
        again = _attention_kept(s, layout) - s.residual + _scores_kept(s, layout)
        return again + max(feed_forward, attention) + gradients
    if layout.recompute == "selective":
        attention += _scores_kept(s, layout)
    return max(_feed_forward_at_work(s), attention - feed_forward) + gradients


def _norm_kept(s: Sizes, layout: Layout) -> int:
    """Its input; of one that is many kernels, the input in float32 and what its weights are multiplied with."""
    return s.residual if layout.norm != "unfused" else 2 * s.as_float32(s.residual)


def _mask(s: Sizes, layout: Layout) -> int:
    """Of dropout on the residual stream, a byte a value."""
    return s.residual // s.item_bytes if s.model.norm == "layernorm" and layout.shard != "all" else 0


def _attention_kept(s: Sizes, layout: Layout) -> int:
    """Without scores."""
    return _norm_kept(s, layout) + s.residual + 2 * s.queries + 2 * s.keys + _mask(s, layout)


def _feed_forward_kept(s: Sizes, layout: Layout) -> int:
    """With a gate: what goes into the activation function and what comes out, the other factor, the product."""
    inner = 4 * s.ffn if s.model.activation == "swiglu" else 2 * s.ffn
    return _norm_kept(s, layout) + s.residual + inner + _mask(s, layout)


def _scores(s: Sizes) -> int:
    """How many a rank has."""
    return s.samples * s.model.heads * s.sequence * s.sequence // s.tp


def _scores_kept(s: Sizes, layout: Layout) -> int:
    if layout.attention in ("flash", "flash1"):
        return s.log_sums
    float32 = 4 if layout.attention == "unfused" else 0  # the softmax itself, of which a copy goes on
    return _scores(s) * (2 * s.item_bytes + 1 + float32)


def _scores_at_work(s: Sizes, layout: Layout) -> int:
    """Gradients in attention's backward pass: of queries (flash: summed in float32), keys, values; of scores, twice."""
    if layout.attention in ("flash", "flash1"):
        return s.queries + s.as_float32(s.queries) + 2 * s.keys
    float32 = 4 if layout.attention == "unfused" else 0
    return 2 * _scores(s) * (s.item_bytes + float32)


def _feed_forward_at_work(s: Sizes) -> int:
    """Gradients of the product and of its factors."""
    return (3 if s.model.activation == "swiglu" else 2) * s.ffn


def _forward_temporary(s: Sizes, layout: Layout) -> int:
    """Scores before the softmax; what is not kept of a layer that is made again later."""
    scores = 0 if layout.attention in ("flash", "flash1") else _scores(s) * s.item_bytes
    if layout.recompute == "full":
        return s.whole + 2 * s.residual + max(2 * s.ffn, 2 * s.queries + 2 * s.keys + 2 * scores)
    return s.whole + scores


def has_torch_stack(shape: ModelConfig) -> bool:
    """Whether a model has Llama's shape, whose trainers in print keep to PyTorch's loss and 16-bit gradients."""
    return shape.activation == "swiglu"


def _head_kept(s: Sizes, layout: Layout) -> int:
    """The last norm's input, the output layer's, and what the loss keeps of the logits."""
    kept, _ = _loss(s, layout)
    return 2 * s.residual + kept


def _loss_at_work(s: Sizes, layout: Layout) -> int:
    _, at_work = _loss(s, layout)
    return at_work + s.whole


def _loss(s: Sizes, layout: Layout) -> tuple[int, int]:
    """Bytes kept of the logits, and besides them at work."""
    narrow = s.item_bytes if s.item_bytes < 4 else 0
    if layout.shard == "all":
        return s.item_bytes * s.tokens * s.vocabulary, s.item_bytes * s.tokens * s.vocabulary
    if has_torch_stack(s.model):
        return 4 * s.tokens * s.model.vocabulary, (2 * narrow + 12) * s.tokens * s.model.vocabulary
    return 4 * s.tokens * s.vocabulary, (narrow + 4) * s.tokens * s.vocabulary
