"""Valid values of single keys of a run file: their type, and one row a rule. Pure; schema.py checks keys together."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Callable
from typing import Any, Literal

from hpcllm.errors import ConfigError

Rule = tuple[str, Callable[[Any], bool]]  # what is valid, in words; the test


def _at_least(least: int, keys: str) -> dict[str, Rule]:
    return {key: (f">= {least}", lambda v: v >= least) for key in keys.split()}


def _above(bound: int, keys: str) -> dict[str, Rule]:
    return {key: (f"> {bound}", lambda v: v > bound) for key in keys.split()}


RULES = {  # key -> the rule that its value decides alone
    **_at_least(-1, "checkpoint.stripe_count"),
    **_at_least(
        0,
        """model.kv_heads model.head_channels model.vocabulary model.window mesh.dp pipeline.chunks pipeline.loss_tokens
        optimizer.warmup_steps optimizer.weight_decay optimizer.clip_norm communication.exact_steps
        communication.hash_every_steps checkpoint.every_steps checkpoint.keep_every_steps checkpoint.keep_best
        log.validation_every_steps limits.wall_s limits.margin_s energy.price_per_kwh energy.price_per_node_hour""",
    ),
    **_at_least(
        1,
        """run.steps model.layers model.hidden model.heads model.ffn model.max_sequence model.rope_factor
        model.rope_original_sequence data.sequence_length data.global_batch data.validation_sequences mesh.pp mesh.tp
        pipeline.microbatches precision.loss_scale precision.loss_scale_steps checkpoint.keep checkpoint.stripe_mib
        log.every_steps""",
    ),
    **_above(
        0,
        """model.norm_epsilon model.rope_low_frequency model.rope_high_frequency optimizer.learning_rate
        optimizer.epsilon communication.bucket_mib limits.stall_s""",
    ),
    **_above(1, "model.rope_theta"),
    "run.name": (
        "a printable name without '/' that does not start with '.'",
        lambda v: v.isprintable() and v[:1] not in ("", ".") and "/" not in v,
    ),
    "run.seed": ("0 <= seed < 2^63", lambda v: 0 <= v < 2**63),
    "model.rope_fraction": ("0 < rope_fraction <= 1", lambda v: 0 < v <= 1),
    "mesh.order": (
        "the axes tp, dp and pp, each once, fastest first",
        lambda v: sorted(v.split(",")) == ["dp", "pp", "tp"],
    ),
    "pipeline.layers": ("at least one block for each virtual stage", lambda v: all(blocks >= 1 for blocks in v)),
    "pipeline.recompute": (
        "none, selective or full, or one of them for each virtual stage, as in 'full,full,none,none'",
        lambda v: all(word in ("none", "selective", "full") for word in v.split(",")),
    ),
    "optimizer.final_fraction": ("0 to 1", lambda v: 0 <= v <= 1),
    "optimizer.beta1": ("0 <= beta1 < 1", lambda v: 0 <= v < 1),
    "optimizer.beta2": ("0 <= beta2 < 1", lambda v: 0 <= v < 1),
    "log.trace_steps": ("steps, from 1 on", lambda v: all(step >= 1 for step in v)),
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
        if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
            raise ConfigError(f"{key} = {value!r} should be a list of whole numbers, for example {key} = [5, 6, 6, 5]")
        return tuple(value)
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
