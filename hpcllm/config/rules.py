"""Valid values of single keys of a run file: their type, and one row a rule. Pure; schema.py checks keys together."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hpcllm.config.names import closest, shown
from hpcllm.errors import ConfigError

Rule = tuple[str, Callable[[Any], bool]]  # what is valid, in words; the test
LARGEST_EXACT = 1 << 53  # as a float; beyond it every range has ended
MOST_RANKS = 1 << 20  # more than any machine has
MOST_LAYERS = 1024  # of published models few have more than 128
LONGEST_PATH_BYTES, LONGEST_NAME_BYTES = 4095, 255  # of Linux: a path, each name in it
MOST_TASKS = 100
MOST_SHOTS = 100
LONGEST_RUN_NAME_BYTES = 200  # a restart and writers of checkpoints add to it


@dataclass(frozen=True)
class Range:
    """Range of valid values of a number."""

    least: float
    most: float
    above: bool = False  # the least itself is not one of them

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        return (
            f"> {self.least:g}, up to {_amount(self.most)}" if self.above else f"{self.least:g} to {_amount(self.most)}"
        )


def _between(least: float, most: float, keys: str) -> dict[str, Range]:
    return dict.fromkeys(keys.split(), Range(least, most))


def _above(bound: float, most: float, keys: str) -> dict[str, Range]:
    return dict.fromkeys(keys.split(), Range(bound, most, above=True))


def _amount(number: float) -> str:
    """Write 4096, 2^20 or 1e9: a bound in few characters."""
    if number > 1e4 and number == 1 << (int(number).bit_length() - 1):
        return f"2^{int(number).bit_length() - 1}"
    return f"{number:.0e}".replace("e+0", "e") if number > 1e4 else f"{number:g}"


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))


def _is_path(text: str) -> bool:
    longest = max(map(_bytes, text.split("/")))
    return "\0" not in text and _bytes(text) <= LONGEST_PATH_BYTES and longest <= LONGEST_NAME_BYTES


def _paths(keys: str) -> dict[str, Rule]:
    valid = f"a path without NUL, of at most {LONGEST_PATH_BYTES} bytes, {LONGEST_NAME_BYTES} a name"
    return dict.fromkeys(keys.split(), (valid, _is_path))


RANGES = {  # key -> range of its number
    # steps
    **_between(1, 10**9, "run.steps precision.loss_scale_steps log.every_steps"),
    **_between(
        0,
        10**9,
        """optimizer.warmup_steps communication.exact_steps communication.hash_every_steps checkpoint.every_steps
        checkpoint.keep_every_steps log.validation_every_steps evaluation.every_steps""",
    ),
    # sizes of the model and its samples; the largest are far beyond any that was trained
    **_between(1, MOST_LAYERS, "model.layers"),
    **_between(1, 1 << 20, "model.hidden"),
    **_between(1, 1 << 16, "model.heads"),
    **_between(0, 1 << 16, "model.kv_heads model.head_channels"),
    **_between(1, 1 << 24, "model.ffn"),
    **_between(0, 1 << 24, "model.vocabulary"),
    **_between(1, 1 << 30, "model.max_sequence model.rope_original_sequence data.sequence_length"),
    **_between(0, 1 << 30, "model.window"),
    **_between(1, 10**6, "model.rope_factor"),
    **_above(0, 1, "model.norm_epsilon"),
    **_above(0, 10**9, "model.rope_low_frequency model.rope_high_frequency"),
    **_above(1, 10**12, "model.rope_theta"),
    **_between(1, 1 << 40, "data.global_batch data.validation_sequences"),
    # ranks and their work
    **_between(0, MOST_RANKS, "mesh.dp"),
    **_between(1, MOST_RANKS, "mesh.pp mesh.tp"),
    **_between(1, 1 << 22, "pipeline.microbatches"),
    **_between(0, MOST_LAYERS, "pipeline.chunks"),
    **_between(0, 1 << 40, "pipeline.loss_tokens"),
    # numbers of the optimizer, and of 16-bit gradients
    **_above(0, 10**6, "optimizer.learning_rate optimizer.epsilon"),
    **_between(0, 10**6, "optimizer.weight_decay"),
    **_between(0, 10**9, "optimizer.clip_norm"),
    **_between(1, 1 << 40, "precision.loss_scale"),
    # fine-tuning
    **_between(0, 1 << 16, "finetuning.adapter.rank"),
    **_above(0, 10**6, "finetuning.adapter.alpha finetuning.beta"),
    # messages, files, time, money
    **_above(0, 1 << 20, "communication.bucket_mib"),
    **_between(1, 10**6, "checkpoint.keep evaluation.examples"),
    **_between(0, MOST_SHOTS, "evaluation.shots"),
    **_between(0, 10**6, "checkpoint.keep_best"),
    **_between(-1, 2000, "checkpoint.stripe_count"),
    **_between(1, 4095, "checkpoint.stripe_mib"),
    **_above(0, 10**9, "limits.stall_s"),
    **_between(0, 10**9, "limits.wall_s limits.margin_s energy.price_per_kwh energy.price_per_node_hour"),
}
TRACKERS = ("tensorboard", "wandb", "mlflow")
LAYERS = ("query", "key", "value", "output", "gate", "up", "down")  # linear layers of a block
RULES: dict[str, Rule] = {  # key -> the rule that its value decides alone
    **{key: (str(valid), valid.__contains__) for key, valid in RANGES.items()},
    **_paths("run.folder run.start_from run.machine data.store pipeline.file communication.tuning"),
    "run.name": (
        f"a printable name without '/' that does not start with '.', of at most {LONGEST_RUN_NAME_BYTES} bytes",
        lambda v: v.isprintable() and v[:1] not in ("", ".") and "/" not in v and _bytes(v) <= LONGEST_RUN_NAME_BYTES,
    ),
    "run.seed": ("0 <= seed < 2^63", lambda v: 0 <= v < 2**63),
    "model.rope_fraction": ("0 < rope_fraction <= 1", lambda v: 0 < v <= 1),
    "mesh.order": (
        "the axes tp, dp and pp, each once, fastest first",
        lambda v: sorted(v.split(",")) == ["dp", "pp", "tp"],
    ),
    "pipeline.layers": (
        f"1 to {MOST_LAYERS} blocks for each virtual stage",
        lambda v: all(1 <= blocks <= MOST_LAYERS for blocks in v) and len(v) <= MOST_LAYERS,
    ),
    "pipeline.recompute": (
        "none, selective or full, or one of them for each virtual stage, as in 'full,full,none,none'",
        lambda v: all(word in ("none", "selective", "full") for word in v.split(",")),
    ),
    "optimizer.final_fraction": ("0 to 1", lambda v: 0 <= v <= 1),
    "optimizer.beta1": ("0 <= beta1 < 1", lambda v: 0 <= v < 1),
    "optimizer.beta2": ("0 <= beta2 < 1", lambda v: 0 <= v < 1),
    "evaluation.tasks": (
        f"up to {MOST_TASKS} names without NUL, each once",
        lambda v: len(v) <= MOST_TASKS and len(set(v)) == len(v) and all(v) and "\0" not in "".join(v),
    ),
    "log.trackers": (
        f"any of {', '.join(TRACKERS)}, each once",
        lambda v: set(v) <= set(TRACKERS) and len(set(v)) == len(v),
    ),
    "finetuning.adapter.targets": (
        f"some of {', '.join(LAYERS)}, each once",
        lambda v: 0 < len(v) == len(set(v)) and set(v) <= set(LAYERS),
    ),
    "log.trace_steps": ("steps, from 1 to 1e9", lambda v: all(1 <= step <= 10**9 for step in v)),
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
        value = value.lower() if isinstance(value, str) else value  # all choices are in small letters
        if value not in choices:
            close = closest(str(value), choices)
            hint = f"; did you mean {close!r}?" if close else ""
            raise ConfigError(f"{key} = {shown(value)} should be one of {', '.join(map(repr, choices))}{hint}")
        return value
    value = typed(key, value, kind)
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{key} = {value} should be a finite number")
    valid, holds = RULES.get(key, ("", lambda _: True))
    if not holds(value):
        given = list(value) if isinstance(value, tuple) else value  # as the file has it
        raise ConfigError(f"{key} = {shown(given)} is out of range; valid: {valid}")
    return value


def typed(key: str, value: Any, kind: Any) -> Any:
    """Check the type of a value alone."""
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        if not isinstance(value, list | tuple) or any(type(item) is not item_kind for item in value):
            items, example = ("whole numbers", "[5, 6, 6, 5]") if item_kind is int else ("names", '["tensorboard"]')
            raise ConfigError(f"{key} = {shown(value)} should be a list of {items}, for example {key} = {example}")
        return tuple(value)
    if kind is float and type(value) is int:
        if abs(value) < LARGEST_EXACT:
            return float(value)
        raise ConfigError(f"{key} = {shown(value)} is out of range; valid: {RULES[key][0] if key in RULES else 'less'}")
    if type(value) is not kind:
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        hint = f"; write {value:.0f}" if kind is int and isinstance(value, float) and value.is_integer() else ""
        raise ConfigError(f"{key} = {shown(value)} should be {names[kind]}{hint}")
    return value
