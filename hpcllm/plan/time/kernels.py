"""List the kernels of the passes of a microbatch: matrix products, fused attention, and kernels that only move bytes.

    forward    norm [q k v] turn  attention  [output] drop+add   norm [up] act [down] drop+add        [...] products
    backward   the same from its end: two products for each, g w for the input and g^T x for the weight, and the sum of
               the gradients; our products add to that sum, and to what other layers give the same input, by themselves
    recompute  what recomputation repeats in front of the backward pass: the block, or its attention

Each kernel says its shape and what it reads and writes; roofline.py says how long that takes. Bytes follow from the
operations, e the bytes of a value: a fused LayerNorm reads x and writes y, 2e a value; one of PyTorch's operations in
float32 makes a pass over memory for each. Ours are those of model/gpu/fused.py, as on a device that kernels can be
compiled for; where kernels were measured, as on CPUs, their times replace bytes and launches. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpcllm.config.schema import ModelConfig
from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model

Orientation = Literal["forward", "input", "weight"]  # x w^T, g w, g^T x
SCORES = ("materialized", "unfused")  # kinds of attention that write their scores to memory
SUMMED_BYTES = 8.0  # a float32 read and written
# of our RMSNorm, as model/gpu/fused.py says: channels up to which its backward pass reads its operands once, and rows
# whose part of the weight's gradient is written and read
ONCE_CHANNELS, PART_ROWS = 2048, 8


@dataclass(frozen=True)
class Product:
    """Multiply an m x k matrix by a k x n one, `batch` times."""

    m: float
    n: float
    k: float
    batch: float = 1.0
    orientation: Orientation = "forward"
    item_bytes: int = 2
    sum_bytes: float = 0.0  # moved for a result that is added to what is there; 0: it is written as an item

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def moved_bytes(self) -> float:
        result_bytes = self.sum_bytes or self.item_bytes
        operands = self.item_bytes * (self.m * self.k + self.k * self.n)
        return self.batch * (operands + result_bytes * self.m * self.n)


@dataclass(frozen=True)
class Flash:
    """Causal attention that keeps its scores on the chip, for all heads of a microbatch."""

    heads: float  # number of heads, times samples of the microbatch
    sequence: float
    channels: float  # number of channels of a head
    backward: bool
    first_version: bool
    item_bytes: int = 2

    @property
    def flops(self) -> float:
        """Number of FLOPs as if no score were masked and nothing recomputed."""
        return (8.0 if self.backward else 4.0) * self.heads * self.sequence**2 * self.channels

    @property
    def moved_bytes(self) -> float:
        return (8 if self.backward else 4) * self.heads * self.sequence * self.channels * self.item_bytes


@dataclass(frozen=True)
class Stream:
    """One or several kernels that go over memory. kernel: as kernel_times.py names it, where that measures it."""

    kernel: str
    values: float
    value_bytes: float  # read and written for each value
    launches: int = 1

    @property
    def moved_bytes(self) -> float:
        return self.values * self.value_bytes


Kernel = Product | Flash | Stream
Kernels = tuple[Kernel, ...]


@dataclass(frozen=True)
class Piece:
    """The kernels of a part of the model, for one microbatch on one rank."""

    forward: Kernels = ()
    backward: Kernels = ()  # without weights' gradients
    weight: Kernels = ()  # weights' gradients
    recompute: Kernels = ()  # forward kernels that run again before the backward pass


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Sizes and choices that decide the kernels of a microbatch on one rank."""

    model: ModelConfig
    sequence: int
    samples: int
    tp: int
    sequence_parallel: bool
    item_bytes: int
    attention: str
    fused_norm: bool
    recompute: str
    ours: bool  # hpcllm's own kernels, or those of Megatron-LM
    sum_bytes: float  # moved to add a gradient to its sum

    @property
    def tokens(self) -> float:
        return float(self.samples * self.sequence)

    @property
    def residual(self) -> float:
        """Number of values of the residual stream: of a part of the sequence, where tp splits that."""
        return self.tokens * self.model.hidden / (self.tp if self.sequence_parallel else 1)

    @property
    def heads(self) -> float:
        """Number of heads of this rank, of all samples."""
        return self.samples * self.model.heads / self.tp

    @property
    def queries(self) -> float:
        """Number of query channels of all heads of this rank."""
        return self.model.heads * self.model.head_dim / self.tp

    @property
    def keys(self) -> float:
        return self.model.key_value_heads * self.model.head_dim / self.tp

    @property
    def dropout(self) -> bool:
        """True for models that others train with dropout: GPT's, with biases everywhere."""
        return not self.ours and self.model.biases == "all"


def microbatch_of(model: Model, layout: Layout) -> Microbatch:
    """Take from a layout what its kernels depend on: nothing of pipelines and replicas."""
    kept = gradient_bytes(layout)
    return Microbatch(
        model=model.shape,
        sequence=model.sequence,
        samples=layout.micro_batch,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        item_bytes=layout.item_bytes,
        attention="flash" if layout.trainer == "hpcllm" else layout.attention,
        fused_norm=layout.norm == "fused" or (layout.norm == "usual" and model.shape.norm == "layernorm"),
        recompute=layout.recompute,
        ours=layout.trainer == "hpcllm",
        sum_bytes=layout.item_bytes + (8.0 if kept >= 4 else 2.0 * layout.item_bytes),
    )


def gradient_bytes(layout: Layout) -> float:
    """Return the bytes of a parameter's gradient, in all the copies that the trainer keeps."""
    if layout.gradient_bytes:
        return layout.gradient_bytes
    return {"fp32": 4, "fp16": 2, "bf16": 6}[layout.precision] if layout.trainer == "megatron" else 4


def linear(b: Microbatch, tokens: float, outputs: float, inputs: float) -> Piece:
    """List the kernels of a linear layer: its product, those of its gradients, and the sum of the weight's.

    Ours adds the weight's to its float32 sum as it makes it (model/gradient_sums.py).
    """
    e, sizes = b.item_bytes, (outputs, inputs, tokens, 1.0)
    weight: Kernels = (Product(*sizes, "weight", e), Stream("accumulate", outputs * inputs, b.sum_bytes))
    if b.ours:
        weight = (Product(*sizes, "weight", e, SUMMED_BYTES),)
    return Piece(
        (Product(tokens, outputs, inputs, 1.0, "forward", e),),
        (Product(tokens, inputs, outputs, 1.0, "input", e),),
        weight,
    )


def norm(b: Microbatch) -> Piece:
    """List the kernels of a norm. Fused: x in, y out; back x, g in, g out, and x, g once more for the weight.

    Otherwise about ten kernels of PyTorch's, all but the first and last in float32. Our RMSNorm of rows that are not
    too long reads x, g once; the gradient of its weight is added up in one kernel more, else in two.
    """
    e, name = b.item_bytes, b.model.norm
    is_fused = b.fused_norm or b.ours
    forward, backward, launches = (2.0 * e, 5.0 * e, 1) if is_fused else (28.0 + 4 * e, 72.0 + 8 * e, 8)
    back_launches = 2 * launches
    if b.ours and name == "rmsnorm":
        once = b.model.hidden <= ONCE_CHANNELS
        backward, back_launches = (3.0 * e + SUMMED_BYTES / PART_ROWS, 2) if once else (5.0 * e, 3)
    return Piece(
        (Stream(f"{name}_forward", b.residual, forward, launches),),
        (Stream(f"{name}_backward", b.residual, backward, back_launches),),
    )


def addition(b: Microbatch, in_norm: bool = False) -> Piece:
    """List the kernels at the end of a branch: (bias, dropout with its mask, and) the sum with the residual stream.

    Back: the sum of both branches' gradients. in_norm: the next norm's kernel makes it, by bytes on top of its own.
    """
    e, bias = b.item_bytes, 1 if b.model.biases == "all" else 0
    if in_norm:
        return Piece((Stream("add", b.residual, 2.0 * e, 0),), (Stream("add", b.residual, float(e), 0),))
    forward, back = (3 * e + 1, 3 * e + 1) if b.dropout else (3 * e, bias * e)
    return Piece(
        (Stream("add", b.residual, forward),),
        (Stream("add", b.residual, 3.0 * e), Stream("drop", b.residual, back, 2 * bool(back))),
    )


def activation(b: Microbatch) -> Piece:
    """List the kernels of the activation function: GELU one, with its bias; SwiGLU two, ours one."""
    e, values = b.item_bytes, b.tokens * b.model.ffn / b.tp
    if b.model.activation == "swiglu" and b.ours:
        return Piece((Stream("swiglu_forward", values, 3.0 * e),), (Stream("swiglu_backward", values, 5.0 * e),))
    if b.model.activation == "swiglu":
        return Piece((Stream("swiglu_forward", values, 5.0 * e, 2),), (Stream("swiglu_backward", values, 9.0 * e, 3),))
    bias = e if b.model.biases == "all" else 0
    return Piece((Stream("gelu_forward", values, 2.0 * e),), (Stream("gelu_backward", values, 3.0 * e + bias, 2),))


def rotary(b: Microbatch) -> Piece:
    """List the kernels of rotary positions: x cos + rotated x sin, four for each of both; ours one."""
    if b.model.positions != "rotary":
        return Piece()
    values = b.tokens * (b.queries + b.keys) * b.model.turned_channels / b.model.head_dim
    each, launches = (2.0 * b.item_bytes, 1) if b.ours else (9.0 * b.item_bytes, 8)
    return Piece(
        (Stream("rotary_forward", values, each, launches),), (Stream("rotary_backward", values, each, launches),)
    )


def core(b: Microbatch) -> Piece:
    """List the kernels of attention between its linear layers."""
    return _written_core(b) if b.attention in SCORES else _fused_core(b)


def _fused_core(b: Microbatch) -> Piece:
    """List fused attention, and around it the kernels that lay heads next to their tokens, or back.

    Ours are there already: PyTorch's fused kernels take and make heads that lie inside their tokens.
    """
    e, first = b.item_bytes, b.attention == "flash1"
    sizes = (b.heads, float(b.sequence), float(b.model.head_dim))
    order = Stream("order", b.tokens * (b.queries + b.keys), 0.0 if b.ours else 2.0 * e)
    # ours puts the tokens of a gathered sequence in their places: model/tensor_parallel.in_order
    copied = b.tokens * (b.queries + 2 * b.keys) if b.ours and b.sequence_parallel else 0.0
    places = (Stream("places", copied, 2.0 * e),) if copied else ()
    return Piece((*places, order, Flash(*sizes, False, first, e)), (Flash(*sizes, True, first, e), order, *places))


def _written_core(b: Microbatch) -> Piece:
    """List two products a head, and between them mask, scale, softmax and dropout over the whole square of scores.

    Megatron-LM's softmax is one kernel, 2e a score and back 3e; PyTorch's own operations are seven, in float32.
    """
    e, s, d, heads = b.item_bytes, float(b.sequence), float(b.model.head_dim), b.heads
    scores = heads * s * s
    drop = Stream("softmax", scores, 2.0 * e + 1 if b.dropout else 0.0)
    order = Stream("order", b.tokens * (b.queries + b.keys), 2.0 * e, 3)
    if b.attention == "materialized":
        soft, back = Stream("softmax", scores, 2.0 * e), Stream("softmax", scores, 3.0 * e)
    else:
        soft, back = Stream("scores", scores, 20.0 + 4 * e, 7), Stream("scores", scores, 20.0 + 6 * e, 7)

    def products(orientation: Orientation) -> Kernels:
        return (Product(s, s, d, heads, orientation, e), Product(s, d, s, heads, orientation, e))

    return Piece(
        (*products("forward"), soft, drop, order), (*products("input"), *products("weight"), back, drop, order)
    )


def concatenated(*pieces: Piece) -> Piece:
    """Run pieces one after another."""

    ways = ("forward", "backward", "weight", "recompute")
    return Piece(*(tuple(kernel for piece in pieces for kernel in getattr(piece, way)) for way in ways))


def block(b: Microbatch) -> Piece:
    """List the kernels of one of the model's blocks, with what recomputation adds."""
    m, t, up = b.model, b.tokens, b.model.ffn / b.tp
    normed, rotated, inside, active = norm(b), rotary(b), core(b), activation(b)
    attention = (normed, *_columns(b, [b.queries, b.keys, b.keys]), rotated, inside, linear(b, t, m.hidden, b.queries))
    gates = 2 if m.activation == "swiglu" else 1
    network = (normed, *_columns(b, [up] * gates), active, linear(b, t, m.hidden, up))
    in_norm = b.ours and m.norm == "rmsnorm" and not m.parallel_residual and b.recompute != "selective"
    whole = concatenated(*attention, addition(b, in_norm), *network, addition(b))
    recompute = {
        "none": (),
        "selective": concatenated(normed, rotated, inside, normed, active).forward if b.ours else inside.forward,
        "full": whole.forward,
    }
    return replace(whole, recompute=recompute[b.recompute])


def _columns(b: Microbatch, outputs: list[float]) -> list[Piece]:
    """List the layers that read one tensor: one product where others join their weights; ours are apart.

    The gradients that ours give what they read are added up by the products, from the second on.
    """
    if not b.ours:
        return [linear(b, b.tokens, sum(outputs), b.model.hidden)]
    pieces = [linear(b, b.tokens, each, b.model.hidden) for each in outputs]
    adding = Product(b.tokens, b.model.hidden, 0.0, 1.0, "input", b.item_bytes, 2.0 * b.item_bytes)
    added = [replace(piece, backward=(replace(adding, k=each),)) for piece, each in zip(pieces, outputs, strict=True)]
    return [*pieces[:1], *added[1:]]


def embedding(b: Microbatch) -> Piece:
    """List the kernels of the embedding: rows of the table; back, its gradient, zero elsewhere, and the sum.

    Ours sorts the tokens, makes their gradients float32 and adds them to rows of the sum; that this begins as zero,
    once a step, is not counted.
    """
    e, table = b.item_bytes, b.model.vocabulary * b.model.hidden / b.tp
    values = b.tokens * b.model.hidden
    forward = (Stream("embedding_forward", values, (3.0 if b.dropout else 2.0) * e, 3),)
    if b.ours:
        widened = e + 4.0 if e < 4 else 0.0
        return Piece(forward, (Stream("embedding_backward", values, widened + 4.0 + SUMMED_BYTES, 6),))
    return Piece(
        forward,
        (Stream("embedding_backward", values, 3.0 * e, 2), Stream("zero", table, float(e))),
        (Stream("accumulate", table, b.sum_bytes),),
    )


def head(b: Microbatch) -> Piece:
    """List the kernels of the last norm, the output layer and the loss; never recomputed.

    Scores are float32 from the product on: copied, their largest taken, exponents, their sum, the softmax; back, the
    softmax less the target, in 16 bit. Ours read the scores once, and back make them the gradient in place.
    """
    outputs = b.model.vocabulary / b.tp
    scores, e = b.tokens * outputs, b.item_bytes
    forward, back = ((float(e), 1), (2.0 * e, 1)) if b.ours else ((36.0 + e, 6), (12.0 + e, 2))
    loss = Piece((Stream("loss_forward", scores, *forward),), (Stream("loss_backward", scores, *back),))
    if b.ours and b.tp > 1:  # this rank's part of the normaliser, where no kernel brings it along: model/loss.py
        loss = concatenated(loss, Piece((Stream("largest", scores, 0.0), Stream("largest", scores, 0.0))))
    return concatenated(norm(b), linear(b, b.tokens, outputs, b.model.hidden), loss)
