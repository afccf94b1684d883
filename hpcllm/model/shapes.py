"""Names and shapes of a model's parameters, and the part of each that a rank holds: one table for the network, the
checkpoint and the planner. Pure.

    embedding.weight  positions.weight   [first stage]
    blocks.<i>.attention_norm | attention.{query,key,value,output} | ffn_norm | ffn.{up,gate,down}
        of a layer with a low-rank adapter besides: <layer>.adapter_a  <layer>.adapter_b
    final_norm.weight  head.weight       [last stage; head is the embedding when tied]

A name carries no rank and a shape is global, so any layout can read what any other wrote. Linear weights are
(outputs, inputs), as torch.nn.Linear has them. A pipeline stage holds a span of the blocks; of its parameters a
tensor-parallel rank holds shards (arXiv:1909.08053 section 3):

    columns   query, key, value, gate, up, and their biases     rows of the weight (its outputs) are split
    rows      output, down                                      columns of the weight (its inputs) are split
    tables    embedding, head                                   rows: the vocabulary, which need not divide evenly
    the rest  norms, positions, biases of row layers            whole on every rank

An adapter (arXiv:2106.09685 section 4.1) is split as its layer is: where that is columns, b by its outputs, where it is
rows, a by its inputs; the other one is whole, and each rank has a part of its gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hpcllm.config.schema import AdapterConfig, ModelConfig
from hpcllm.mpi.partition import chunk_range

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
ENDS = "ends"  # the unit of embeddings, final norm and head, whatever of them a stage has
_COLUMNS = ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
_ROWS = ("attention.output", "ffn.down")
_TABLES = ("embedding.weight", "head.weight")
BASE_BITS = {"int8": 8, "int4": 4}
ADAPTER_A, ADAPTER_B = "adapter_a", "adapter_b"  # (rank, inputs) and (outputs, rank)


@dataclass(frozen=True)
class StageSpan:
    """The part of the model that one pipeline stage holds: blocks first..last-1, and what hangs on either end."""

    first_block: int
    last_block: int  # one past
    has_embedding: bool
    has_head: bool


def split_layers(model: ModelConfig, stages: int) -> list[StageSpan]:
    """Cut the blocks into contiguous spans, one at least for each of 1 <= stages <= layers, by what they cost.

    The head is part of the last stage and costs as much as so many blocks; the slowest stage is made as fast as can be.
    Looking up embeddings costs nothing in comparison.
    """
    if stages == 1:
        return [StageSpan(0, model.layers, True, True)]
    head = head_in_blocks(model)

    def slowest(last: int) -> float:
        return max(math.ceil((model.layers - last) / (stages - 1)), last + head)

    last = min(range(1, model.layers - stages + 2), key=slowest)
    share, extra = divmod(model.layers - last, stages - 1)
    return cut_layers([share + (stage < extra) for stage in range(stages - 1)] + [last])


def cut_layers(sizes: Sequence[int]) -> list[StageSpan]:
    """Make spans of so many blocks each, in the order of the model."""
    ends = itertools.accumulate(sizes)
    return [
        StageSpan(end - size, end, stage == 0, stage == len(sizes) - 1)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def head_in_blocks(model: ModelConfig) -> float:
    """FLOPs of the output layer over FLOPs of one block, at the longest sequence."""
    block = sum(math.prod(shape) for shape in _block(model).values() if len(shape) == 2)
    attention = 12.0 * model.heads * model.head_dim * model.max_sequence
    return 6.0 * model.vocabulary * model.hidden / (6.0 * block + attention)


def parameter_shapes(model: ModelConfig, span: StageSpan | None = None) -> dict[str, Shape]:
    """Map name -> global shape, in the order of the forward pass; of the whole model, or of one stage.

    With tied weights a last stage that is not the first holds a copy of `embedding.weight`, under that name.
    """
    span = span or StageSpan(0, model.layers, True, True)
    shapes: dict[str, Shape] = {}
    if span.has_embedding:
        shapes["embedding.weight"] = (model.vocabulary, model.hidden)
        if model.positions == "learned":
            shapes["positions.weight"] = (model.max_sequence, model.hidden)
    for block in range(span.first_block, span.last_block):
        shapes.update({f"blocks.{block}.{name}": shape for name, shape in _block(model).items()})
    if span.has_head:
        shapes.update(_norm("final_norm", model))
        shapes.setdefault("embedding.weight" if model.tied else "head.weight", (model.vocabulary, model.hidden))
    return shapes


def adapter_shapes(model: ModelConfig, adapter: AdapterConfig, span: StageSpan | None = None) -> dict[str, Shape]:
    """Map name -> global shape of the adapters, in the order of the forward pass; none if their rank is 0."""
    shapes: dict[str, Shape] = {}
    for name, shape in parameter_shapes(model, span).items() if adapter.rank else ():
        layer, _, kind = name.rpartition(".")
        if name.startswith("blocks.") and kind == "weight" and layer.rpartition(".")[2] in adapter.targets:
            shapes |= {
                f"{layer}.{ADAPTER_A}": (adapter.rank, shape[1]),
                f"{layer}.{ADAPTER_B}": (shape[0], adapter.rank),
            }
    return shapes


def trained_shapes(model: ModelConfig, adapter: AdapterConfig, span: StageSpan | None = None) -> dict[str, Shape]:
    """Map name -> global shape of what a run updates: adapters alone, or where there are none all parameters."""
    return adapter_shapes(model, adapter, span) or parameter_shapes(model, span)


def is_adapter(name: str) -> bool:
    return name.endswith((ADAPTER_A, ADAPTER_B))


def split_dim(name: str) -> int | None:
    """The dim of a parameter that tp splits; None: every rank has all of it."""
    layer, _, kind = name.rpartition(".")
    if name in _TABLES or (layer.endswith(_COLUMNS) and kind != ADAPTER_A):
        return 0
    return 1 if layer.endswith(_ROWS) and kind in ("weight", ADAPTER_A) else None


def unit_of(parameter: str) -> str:
    """The unit of a parameter, "blocks.<i>" or ENDS: what a sharded optimizer gathers, and frees, at once."""
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("blocks.") else ENDS


class UnshardHooks:
    """Called around the work of each unit, to have its parameters there in time. These do nothing: they always are.

        x = before_unit("blocks.3", x);  x = block(x);  x = after_unit("blocks.3", x)

    A sharded optimizer waits in the first for parameters that are still being gathered. Where they are sharded too
    (ZeRO-3) it gathers a unit before its work and frees it after; through the x that a hook returns it takes part in
    the backward pass as well. ENDS is announced before the embedding and the head, and never freed by a hook.
    """

    def before_unit(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        """Called before the unit's work on x; returns x, or another tensor of the same values."""
        return x

    def after_unit(self, unit: str, x: Tensor) -> Tensor:  # noqa: ARG002
        """Called after the unit's work, which made x; returns x, or another tensor of the same values."""
        return x


def shard_of(name: str, shape: Shape, rank: int, size: int) -> tuple[Shape, Shape]:
    """Start and shape of the part that tp rank `rank` of `size` holds of a parameter of that global shape."""
    dim = split_dim(name)
    start, local = [0] * len(shape), list(shape)
    if dim is not None:
        start[dim], end = chunk_range(shape[dim], size, rank)
        local[dim] = end - start[dim]
    return tuple(start), tuple(local)


def split_sizes(
    model: ModelConfig, spans: Sequence[StageSpan], tp: int, tp_rank: int = 0, adapter: AdapterConfig | None = None
) -> dict[str, int]:
    """Elements of each parameter of these spans that a tp rank has; an embedding that is first and last counts once.

    adapter: only of what a run with it trains.
    """
    of_span = partial(trained_shapes, model, adapter) if adapter else partial(parameter_shapes, model)
    shapes = {name: shape for span in spans for name, shape in of_span(span=span).items()}
    return {name: math.prod(shard_of(name, shape, tp_rank, tp)[1]) for name, shape in shapes.items()}


def parameter_count(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def flops_per_token(model: ModelConfig, sequence_length: int, adapter: AdapterConfig | None = None) -> float:
    """FLOPs of one forward and backward pass per token, the model's own (nothing recomputed).

    6 per weight of a matrix product, and 12 x channels of all heads x sequence a layer for the two products of
    attention (arXiv:2104.04473 counts the whole square of scores, not the causal half; so do we). With adapters 4 per
    weight that is frozen, whose gradient nobody makes, and 6 per value of theirs.
    """
    shapes = parameter_shapes(model)
    matrices = sum(math.prod(s) for name, s in shapes.items() if len(s) == 2 and name.startswith(("blocks.", "head.")))
    head = math.prod(shapes["embedding.weight"]) if model.tied else 0
    adapters = sum(math.prod(s) for s in adapter_shapes(model, adapter).values()) if adapter else 0
    products = (4.0 if adapters else 6.0) * (matrices + head) + 6.0 * adapters
    return products + 12.0 * model.layers * model.heads * model.head_dim * sequence_length


def _block(model: ModelConfig) -> dict[str, Shape]:
    queries, key_values = model.heads * model.head_dim, model.key_value_heads * model.head_dim
    shapes = _norm("attention_norm", model)
    shapes |= _linear("attention.query", queries, model.hidden, model)
    shapes |= _linear("attention.key", key_values, model.hidden, model)
    shapes |= _linear("attention.value", key_values, model.hidden, model)
    shapes |= _linear("attention.output", model.hidden, queries, model)
    shapes |= _norm("ffn_norm", model)
    if model.activation == "swiglu":
        shapes |= _linear("ffn.gate", model.ffn, model.hidden, model)
    shapes |= _linear("ffn.up", model.ffn, model.hidden, model)
    shapes |= _linear("ffn.down", model.hidden, model.ffn, model)
    return shapes


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (model.hidden,)}
    if model.norm == "layernorm":
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes


def has_bias(layer: str, model: ModelConfig) -> bool:
    """True if a linear layer of a block has a bias, by the end of its name."""
    return model.biases == "all" or (model.biases == "qkv" and layer.endswith((".query", ".key", ".value")))


def _linear(name: str, outputs: int, inputs: int, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    if has_bias(name, model):
        shapes[f"{name}.bias"] = (outputs,)
    return shapes
