r"""Which part of each parameter a tensor-parallel rank holds. Pure.

    columns   query, key, value, gate, up, and their biases     rows of the weight (its outputs) are split
    rows      output, down                                      columns of the weight (its inputs) are split
    tables    embedding, head                                   rows: the vocabulary, which need not divide evenly
    the rest  norms, positions, biases of row layers            whole on every rank

Source: arXiv:1909.08053 section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcllm.chunks import chunk_range
from hpcllm.config import ModelConfig
from hpcllm.model.shapes import Shape, StageSpan, parameter_shapes

_COLUMNS = ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
_ROWS = ("attention.output", "ffn.down")
_TABLES = ("embedding.weight", "head.weight")


def split_dim(name: str) -> int | None:
    """The dim of a parameter that tp splits; None: every rank has all of it."""
    layer, _, kind = name.rpartition(".")
    if name in _TABLES or layer.endswith(_COLUMNS):
        return 0
    return 1 if layer.endswith(_ROWS) and kind == "weight" else None


def shard_of(name: str, shape: Shape, rank: int, size: int) -> tuple[Shape, Shape]:
    """Start and shape of what tp rank `rank` of `size` holds of a parameter of that global shape."""
    dim = split_dim(name)
    start, local = [0] * len(shape), list(shape)
    if dim is not None:
        start[dim], end = chunk_range(shape[dim], size, rank)
        local[dim] = end - start[dim]
    return tuple(start), tuple(local)


def split_sizes(model: ModelConfig, spans: Sequence[StageSpan], tp: int, tp_rank: int = 0) -> dict[str, int]:
    """Elements of each parameter of these spans that a tp rank has; an embedding that is first and last counts once."""
    shapes = {name: shape for span in spans for name, shape in parameter_shapes(model, span).items()}
    return {name: math.prod(shard_of(name, shape, tp_rank, tp)[1]) for name, shape in shapes.items()}
