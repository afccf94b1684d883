"""The model of a plan: a preset by name, or a shape in a line.

    gpt3-175b     layers=70,hidden=14336,heads=112,ffn=57344,vocab=51200,sequence=2048     ...,kv_heads=8,gated=true

A shape without a gate is GPT's: LayerNorm, GELU, biases, learned positions, the output layer tied to the embedding.
With one it is Llama's: RMSNorm, SwiGLU, no biases, rotary positions, an output layer of its own. If it is not said, a
feed-forward network of 4 hidden channels has no gate, and any other has. Any key of [model] is taken, too. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcllm import config as run_file
from hpcllm.config import Config, ModelConfig
from hpcllm.errors import ConfigError
from hpcllm.model.shapes import flops_per_token, parameter_count
from hpcllm.plan.layouts import parse_pairs

ALIASES = {"vocab": "vocabulary", "sequence": "sequence_length"}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "biases": "all", "positions": "learned", "tied": True}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "biases": "none", "positions": "rotary", "tied": False}


@dataclass(frozen=True)
class Model:
    """A shape and the length of its samples."""

    name: str
    shape: ModelConfig
    sequence: int  # tokens of a sample

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.shape)

    @cached_property
    def flops_per_token(self) -> float:
        """Of one forward and backward pass, nothing recomputed."""
        return flops_per_token(self.shape, self.sequence)


def read_model(given: str | Mapping[str, Any] | Model, sequence: int | None = None) -> Model:
    """A model by preset, shape, or mapping; `sequence` overrides the length of its samples. Raises ConfigError."""
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
    name = shape.preset if set(table) == {"preset"} else f"{shape.layers} x {shape.hidden}"
    return Model(name, shape, length or shape.max_sequence)


def _shape(pairs: dict[str, Any]) -> dict[str, Any]:
    """The [model] table of a shape, whole."""
    if "preset" in pairs:
        return pairs
    missing = [key for key in ("layers", "hidden", "heads", "vocabulary") if key not in pairs]
    if missing:
        raise ConfigError(f"--model lacks {', '.join(missing)}; a shape is layers, hidden, heads, ffn, vocab, sequence")
    hidden, ffn = pairs["hidden"], pairs.get("ffn")
    usual = 4 * hidden if type(hidden) is int else None
    told = pairs.get("activation", "swiglu" if ffn not in (None, usual) else "gelu") == "swiglu"
    gated = pairs.pop("gated", told)
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
    """With a table of positions that is long enough; the vocabulary has to be known."""
    data = {} if length is None else {"sequence_length": length}
    if length is not None and type(length) is int:
        known = run_file.preset(table["preset"]) if isinstance(table.get("preset"), str) else {}
        longest = table.get("max_sequence", known.get("max_sequence", length))
        if type(longest) is int and longest < length:
            table = {**table, "max_sequence": length}
    config: Config = run_file.from_tables(
        {"model": table, **({"data": data} if data else {"data": {"sequence_length": 1}})}
    )
    if not config.model.vocabulary:
        raise ConfigError(
            f"model.preset = {config.model.preset!r} takes its vocabulary from a token store; give a shape with vocab="
        )
    return config.model
