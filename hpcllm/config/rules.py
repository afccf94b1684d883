"""Valid values of single keys of a run file: their type, and one row a rule. Pure; schema.py checks keys together."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Callable
from typing import Any, Literal

from hpcllm.errors import ConfigError

# key -> (what is valid, test); one row per rule that a single value decides
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "run.name": (
        "a printable name without '/' that does not start with '.'",
        lambda v: v.isprintable() and v[:1] not in ("", ".") and "/" not in v,
    ),
    "run.seed": ("0 <= seed < 2^63", lambda v: 0 <= v < 2**63),
    "run.steps": (">= 1", lambda v: v >= 1),
    "model.layers": (">= 1", lambda v: v >= 1),
    "model.hidden": (">= 1", lambda v: v >= 1),
    "model.heads": (">= 1", lambda v: v >= 1),
    "model.kv_heads": (">= 0", lambda v: v >= 0),
    "model.head_channels": (">= 0", lambda v: v >= 0),
    "model.ffn": (">= 1", lambda v: v >= 1),
    "model.vocabulary": (">= 0", lambda v: v >= 0),
    "model.max_sequence": (">= 1", lambda v: v >= 1),
    "model.norm_epsilon": ("> 0", lambda v: v > 0),
    "model.rope_theta": ("> 1", lambda v: v > 1),
    "model.rope_fraction": ("0 < rope_fraction <= 1", lambda v: 0 < v <= 1),
    "model.rope_factor": (">= 1", lambda v: v >= 1),
    "model.rope_low_frequency": ("> 0", lambda v: v > 0),
    "model.rope_high_frequency": ("> 0", lambda v: v > 0),
    "model.rope_original_sequence": (">= 1", lambda v: v >= 1),
    "model.window": (">= 0", lambda v: v >= 0),
    "data.sequence_length": (">= 1", lambda v: v >= 1),
    "data.global_batch": (">= 1", lambda v: v >= 1),
    "data.validation_sequences": (">= 1", lambda v: v >= 1),
    "mesh.dp": (">= 0", lambda v: v >= 0),
    "mesh.pp": (">= 1", lambda v: v >= 1),
    "mesh.tp": (">= 1", lambda v: v >= 1),
    "mesh.order": (
        "the axes tp, dp and pp, each once, fastest first",
        lambda v: sorted(v.split(",")) == ["dp", "pp", "tp"],
    ),
    "pipeline.microbatches": (">= 1", lambda v: v >= 1),
    "pipeline.chunks": (">= 0", lambda v: v >= 0),
    "pipeline.layers": ("at least one block for each virtual stage", lambda v: all(blocks >= 1 for blocks in v)),
    "pipeline.recompute": (
        "none, selective or full, or one of them for each virtual stage, as in 'full,full,none,none'",
        lambda v: all(word in ("none", "selective", "full") for word in v.split(",")),
    ),
    "pipeline.loss_tokens": (">= 0", lambda v: v >= 0),
    "precision.loss_scale": (">= 1", lambda v: v >= 1),
    "precision.loss_scale_steps": (">= 1", lambda v: v >= 1),
    "optimizer.learning_rate": ("> 0", lambda v: v > 0),
    "optimizer.warmup_steps": (">= 0", lambda v: v >= 0),
    "optimizer.final_fraction": ("0 to 1", lambda v: 0 <= v <= 1),
    "optimizer.weight_decay": (">= 0", lambda v: v >= 0),
    "optimizer.beta1": ("0 <= beta1 < 1", lambda v: 0 <= v < 1),
    "optimizer.beta2": ("0 <= beta2 < 1", lambda v: 0 <= v < 1),
    "optimizer.epsilon": ("> 0", lambda v: v > 0),
    "optimizer.clip_norm": (">= 0", lambda v: v >= 0),
    "communication.exact_steps": (">= 0", lambda v: v >= 0),
    "communication.bucket_mib": ("> 0", lambda v: v > 0),
    "communication.hash_every_steps": (">= 0", lambda v: v >= 0),
    "checkpoint.every_steps": (">= 0", lambda v: v >= 0),
    "checkpoint.keep": (">= 1", lambda v: v >= 1),
    "checkpoint.keep_every_steps": (">= 0", lambda v: v >= 0),
    "checkpoint.keep_best": (">= 0", lambda v: v >= 0),
    "checkpoint.stripe_count": (">= -1", lambda v: v >= -1),
    "checkpoint.stripe_mib": (">= 1", lambda v: v >= 1),
    "log.every_steps": (">= 1", lambda v: v >= 1),
    "log.trace_steps": ("steps, from 1 on", lambda v: all(step >= 1 for step in v)),
    "log.validation_every_steps": (">= 0", lambda v: v >= 0),
    "limits.stall_s": ("> 0", lambda v: v > 0),
    "limits.wall_s": (">= 0", lambda v: v >= 0),
    "energy.price_per_kwh": (">= 0", lambda v: v >= 0),
    "energy.price_per_node_hour": (">= 0", lambda v: v >= 0),
    "limits.margin_s": (">= 0", lambda v: v >= 0),
}


def divisors(n: int) -> str:
    """'1, 2, 4, 8' for 8: the answer that an error about a remainder owes its reader; the first dozen of many."""
    low = [d for d in range(1, math.isqrt(min(n, 10**12)) + 1) if n % d == 0]
    found = sorted({*low, *(n // d for d in low)})
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")


def checked(key: str, value: Any, kind: Any) -> Any:
    """The value of a key of the declared type `kind`, a whole number as float where that is it. Raises ConfigError."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"{key} = {value!r} should be one of {', '.join(map(repr, choices))}")
        return value
    value = typed(key, value, kind)
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{key} = {value} should be a finite number")
    valid, holds = RULES.get(key, ("", lambda _: True))
    if not holds(value):
        shown = list(value) if isinstance(value, tuple) else value  # as the file has it
        raise ConfigError(f"{key} = {shown!r} is out of range; valid: {valid}")
    return value


def typed(key: str, value: Any, kind: Any) -> Any:
    """Check the type of a value alone."""
    if typing.get_origin(kind) is tuple:
        return _whole_numbers(key, value)
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ConfigError(f"{key} = {value!r} should be {names[kind]}")
    return value


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """Nearest valid name, and all valid ones, for the message of an error."""
    close = difflib.get_close_matches(name, list(valid), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}valid: {', '.join(sorted(valid))}"


def _whole_numbers(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
        raise ConfigError(f"{key} = {value!r} should be a list of whole numbers, for example {key} = [5, 6, 6, 5]")
    return tuple(value)
