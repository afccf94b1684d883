"""Read the model of a plan, a preset by name or a shape in a line; and cut it into the stages of a layout.

    gpt3-175b     layers=70,hidden=14336,heads=112,ffn=57344,vocab=51200,sequence=2048     ...,kv_heads=8,gated=true

A shape without a gate is GPT's: LayerNorm, GELU, biases, learned positions, the output layer tied to the embedding.
With one it is Llama's: RMSNorm, SwiGLU, no biases, rotary positions, an output layer of its own. If it is not said, a
feed-forward network of 4 hidden channels has no gate, and any other has. Any key of [model] is taken, too.

    trainer=hpcllm      blocks divided by what they cost, the head counted (model/shapes.py)
    trainer=megatron    as many blocks as others, the last stage what is left: 70 over 8 is 9 9 9 9 9 9 9 7. Where
                        the head is large, embedding and head count as a block each, if that divides: 70 over 12 is
                        5 6 6 6 6 6 6 6 6 6 6 5

A preset's vocabulary is padded to a multiple of 128, as Megatron-LM does: 50257 logits over tp = 4 are no whole number
of 16 bytes, and the head leaves the matrix units. A shape's vocabulary stays as it is given.

Stages that are alike are counted once. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from hpcllm.config import schema as run_file
from hpcllm.config.schema import Config, ModelConfig
from hpcllm.errors import ConfigError
from hpcllm.model.shapes import (
    StageSpan,
    cut_layers,
    flops_per_token,
    head_in_blocks,
    parameter_count,
    split_layers,
    split_sizes,
)
from hpcllm.pipeline.actions import Placement
from hpcllm.pipeline.schedules import SCHEDULES
from hpcllm.plan.layouts import Layout, Schedule, parse_pairs

ALIASES = {"vocab": "vocabulary", "sequence": "sequence_length"}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "biases": "all", "positions": "learned", "tied": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "biases": "none", "positions": "rotary", "tied": False}

PADDED = 128  # multiple of a padded vocabulary: whole rows of 16 bytes on up to 16 tp ranks
LARGE_HEAD = 0.5  # blocks: BLOOM (1.5) and Llama 3 405B (0.7) were cut so, GPT of 175B with 50k tokens (0.3) was not
StageKind = tuple[int, bool, bool]  # number of blocks, has embedding, has head: stages equal in these take the same
HALVED: tuple[Schedule, ...] = ("zb-h1", "zb-v")  # schedules whose backward pass comes in two halves


@dataclass(frozen=True)
class Model:
    """Shape of a model and the length of its samples."""

    name: str
    shape: ModelConfig
    sequence: int  # tokens of a sample
    unpadded: int = 0  # the preset's vocabulary, where another one is planned with

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.shape)

    @property
    def split_by_tp(self) -> dict[str, int]:
        """Sizes that tp has to divide, by their names: weights are split by whole heads."""
        shape = self.shape
        return {"heads": shape.heads, "key and value heads": shape.key_value_heads, "ffn channels": shape.ffn}

    @cached_property
    def most_tp(self) -> int:
        """The largest tp that divides all of these; its divisors do, too."""
        return math.gcd(*self.split_by_tp.values())

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of one forward and backward pass, nothing recomputed."""
        return flops_per_token(self.shape, self.sequence)


def read_model(given: str | Mapping[str, Any] | Model, sequence: int | None = None) -> Model:
    """Read a model by preset, shape, or mapping; `sequence` overrides the length of its samples. Raises ConfigError."""
    if isinstance(given, Model):
        return given if sequence is None else dataclasses.replace(given, sequence=sequence)
    if isinstance(given, str) and "=" not in given:
        table: dict[str, Any] = {"preset": given}
    else:
        pairs = parse_pairs("model", given) if isinstance(given, str) else dict(given)
        table = _shape({ALIASES.get(key, key): value for key, value in pairs.items()})
    length = table.pop("sequence_length", None)
    if sequence is not None:
        length = sequence
    shape = _checked(table, length)
    is_preset = set(table) == {"preset"}
    padded = padded_vocabulary(shape.vocabulary) if is_preset else shape.vocabulary
    unpadded = shape.vocabulary if padded != shape.vocabulary else 0
    name = shape.preset if is_preset else f"{shape.layers} x {shape.hidden}"
    return Model(name, dataclasses.replace(shape, vocabulary=padded), length or shape.max_sequence, unpadded)


def padded_vocabulary(vocabulary: int) -> int:
    """Return the next multiple of PADDED."""
    return -(-vocabulary // PADDED) * PADDED


def _shape(pairs: dict[str, Any]) -> dict[str, Any]:
    """Complete the [model] table of a shape."""
    if "preset" in pairs:
        return pairs
    missing = [key for key in ("layers", "hidden", "heads", "vocabulary") if key not in pairs]
    if missing:
        raise ConfigError(f"--model lacks {', '.join(missing)}; a shape is layers, hidden, heads, ffn, vocab, sequence")
    hidden, ffn = pairs["hidden"], pairs.get("ffn")
    usual = 4 * hidden if type(hidden) is int else None
    default = pairs.get("activation", "swiglu" if ffn not in (None, usual) else "gelu") == "swiglu"
    gated = pairs.pop("gated", default)
    if type(gated) is not bool:
        raise ConfigError(f"--model: gated = {gated!r} should be true or false")
    if ffn is None and (gated or usual is None):
        raise ConfigError(
            "--model lacks ffn, the channels of the feed-forward network; without a gate 4 x hidden are usual"
        )
    pairs["ffn"] = usual if ffn is None else ffn
    length = {"max_sequence": pairs.get("sequence_length", 2048)}
    return {**(LLAMA if gated else GPT), **length, **pairs}


def _checked(table: dict[str, Any], length: int | None) -> ModelConfig:
    """Check the table, make the table of positions long enough; the vocabulary has to be known."""
    if type(length) is int:
        known = run_file.preset(table["preset"]) if isinstance(table.get("preset"), str) else {}
        longest = table.get("max_sequence", known.get("max_sequence", length))
        if type(longest) is int and longest < length:
            table = {**table, "max_sequence": length}
    data = {"sequence_length": 1 if length is None else length}
    config: Config = run_file.from_tables({"model": table, "data": data})
    if not config.model.vocabulary:
        raise ConfigError(
            f"model.preset = {config.model.preset!r} takes its vocabulary from a token store; give a shape with vocab="
        )
    return config.model


def placement_of(layout: Layout) -> Placement:
    """Return which pipeline rank has which virtual stages."""
    return Placement(layout.pp, layout.chunks, SCHEDULES[layout.schedule].placement.kind)


def stage_spans(model: Model, layout: Layout) -> tuple[StageSpan, ...]:
    """Cut the model's blocks into virtual stages."""
    return cut(model.shape, layout.pp * layout.chunks, layout.trainer == "hpcllm")


@lru_cache(maxsize=1 << 10)
def cut(shape: ModelConfig, stages: int, by_cost: bool) -> tuple[StageSpan, ...]:
    """Cut blocks into virtual stages. by_cost: as our trainer does; else as Megatron-LM does."""
    return tuple(_cut(shape, stages, by_cost))


@lru_cache(maxsize=1 << 10)
def fewest_blocks(shape: ModelConfig, stages: int, by_cost: bool) -> int:
    """Return the blocks of the emptiest virtual stage."""
    return min(span.last_block - span.first_block for span in cut(shape, stages, by_cost))


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
    """Return the pipeline rank of each virtual stage."""
    return tuple(placement.home(stage)[0] for stage in range(placement.stages))


def kind_of(span: StageSpan) -> StageKind:
    """Return what decides time and memory of a stage."""
    return span.last_block - span.first_block, span.has_embedding, span.has_head


def kinds_of(spans: Sequence[StageSpan], placement: Placement, rank: int) -> tuple[StageKind, ...]:
    """Return the kinds of the chunks of a pipeline rank."""
    return tuple(kind_of(spans[placement.stage(rank, chunk)]) for chunk in range(placement.chunks))


def spans_like(kinds: Sequence[StageKind]) -> tuple[StageSpan, ...]:
    """Lay spans of these kinds one behind the other."""
    ends = itertools.accumulate(blocks for blocks, _, _ in kinds)
    return tuple(StageSpan(end - kind[0], end, *kind[1:]) for end, kind in zip(ends, kinds, strict=True))


@lru_cache(maxsize=1 << 12)
def held_parameters(shape: ModelConfig, kinds: tuple[StageKind, ...], tp: int) -> float:
    """Return the elements that a rank of one pipeline rank holds, the most of any over tp.

    Every stage has at least one block.
    """
    ends = spans_like([(1, has_embedding, has_head) for _, has_embedding, has_head in kinds])
    more = sum(blocks for blocks, _, _ in kinds) - len(kinds)
    block = sum(split_sizes(shape, [StageSpan(0, 1, False, False)], tp).values())
    return float(sum(split_sizes(shape, ends, tp).values()) + more * block)
