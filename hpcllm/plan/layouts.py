"""Layout of a training run over devices, and its text form of one line.

    tp=8,pp=8,dp=2,micro_batch=2,chunks=1,schedule=1f1b,recompute=full,shard=states,precision=bf16

    devices = dp x pp x tp        global_batch = dp x microbatches x micro_batch

Values of keys are checked here one by one; what must fit together with a model and a batch: run_config.check_fit. Pure.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from hpcllm.config.names import nearest
from hpcllm.config.policies import POLICIES
from hpcllm.config.rules import checked
from hpcllm.errors import ConfigError

Attention = Literal["flash", "flash1", "materialized", "unfused"]
Trainer = Literal["hpcllm", "megatron"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
Shard = Literal["none", "states", "states+gradients", "all"]
Recompute = Literal["none", "selective", "full"]
SIZES = ("dp", "pp", "tp", "micro_batch", "chunks")  # keys that are numbers from 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of one layout, named as in a run file where it has them.

    Raises ConfigError for a value that no layout can have.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    micro_batch: int = 1  # samples of a microbatch
    chunks: int = 1  # virtual stages a rank
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    shard: Shard = "none"
    sequence_parallel: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    # flash: scores never leave the chip (FlashAttention 2); flash1: its first version; materialized: scores in memory,
    # mask, scale and softmax one kernel (Megatron-LM); unfused: each operation a kernel of PyTorch's
    attention: Attention = "flash"
    # unfused: a kernel for each operation, in float32; usual: so of RMSNorm, while LayerNorm is one kernel
    norm: Literal["usual", "fused", "unfused"] = "usual"
    policy: str = "none"  # codecs, as communication.policy
    order: str = "tp,dp,pp"  # fastest-varying axis first: neighbours in rank share a node
    # whose order of work and memory is predicted: ours, or that of Megatron-LM and DeepSpeed, as in published tables
    trainer: Trainer = "hpcllm"
    gradient_bytes: int = 0  # bytes of each parameter's gradient, all copies; 0: the trainer's usual ones
    messages: int = 0  # in which shard=all gathers a block; 0: one for ours, one a matrix for others (ZeRO-3)
    hidden: float = 0.0  # share of what travels beside every pass, with shard=states+gradients or all, that passes hide

    def __post_init__(self) -> None:
        for key in SIZES:
            value = getattr(self, key)
            if type(value) is not int:
                _check_value(key, value)
            if not 1 <= value < 1 << 24:
                raise ConfigError(f"layout.{key} = {getattr(self, key)} is out of range; valid: from 1")
        _check_others(*(getattr(self, key) for key in _others()))

    @property
    def devices(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 4 if self.precision == "fp32" else 2

    def microbatches(self, global_batch: int) -> int:
        """Return the number of microbatches of a replica in a step. Raises ConfigError."""
        count, rest = divmod(global_batch, self.dp * self.micro_batch)
        if rest or not count:
            raise ConfigError(
                f"global_batch = {global_batch} is not dp x micro_batch x a whole number, with dp = {self.dp} and "
                f"micro_batch = {self.micro_batch}; valid: multiples of {self.dp * self.micro_batch}, the nearest "
                f"{nearest_multiples(global_batch, self.dp * self.micro_batch)}"
            )
        return count

    def text(self) -> str:
        """Write what parse_layout reads: all keys that differ from their defaults, and the trainer."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default or f.name == "trainer"]
        words = ((f.name, str(getattr(self, f.name))) for f in changed)
        return ",".join(f"{key}={word.lower() if word in ('True', 'False') else word}" for key, word in words)


def nearest_multiples(count: int, of: int) -> str:
    """Write '992 and 1000' for 997 and 8."""
    below = count // of * of
    return f"{below} and {below + of}" if below else str(of)


@lru_cache(maxsize=1)
def layout_types() -> dict[str, Any]:
    """Return key -> type of its values."""
    return typing.get_type_hints(Layout)


@lru_cache(maxsize=1)
def _others() -> tuple[str, ...]:
    return tuple(key for key in layout_types() if key not in SIZES)


@lru_cache(maxsize=1 << 12, typed=True)
def _check_others(*values: Any) -> None:
    """Check the values of all keys but SIZES; cached, for a search makes tens of thousands of layouts with few."""
    given = dict(zip(_others(), values, strict=True))
    for key, value in given.items():
        _check_value(key, value)
    if not 0 <= given["messages"] < 1 << 24:
        raise ConfigError(f"layout.messages = {given['messages']} is out of range; valid: from 1, or 0 for the usual")
    if not 0 <= given["hidden"] <= 1:
        raise ConfigError(f"layout.hidden = {given['hidden']} is out of range; valid: a share, 0 to 1")
    if given["policy"] not in POLICIES:
        raise ConfigError(f"layout.policy = {given['policy']!r} is unknown; {nearest(given['policy'], POLICIES)}")
    checked("mesh.order", given["order"], str)


def _check_value(key: str, value: Any) -> None:
    checked(f"layout.{key}", value, layout_types()[key])


def parse_step(given: str | Mapping[str, Any] | Layout, global_batch: int | None) -> tuple[Layout, int]:
    """Read a layout and the samples of a step, which may be one of its keys. Raises ConfigError."""
    if not isinstance(given, Layout):
        values = parse_pairs("layout", given) if isinstance(given, str) else dict(given)
        named = values.pop("global_batch", global_batch)
        if global_batch not in (None, named):
            raise ConfigError(f"global_batch is {global_batch}, but the layout says {named}; leave one of the two out")
        given, global_batch = parse_layout(values), named
    if type(global_batch) is not int or not 1 <= global_batch < 1 << 40:
        raise ConfigError(
            f"global_batch = {global_batch!r} should be the samples of a step over all devices, from 1; usual are 1 to "
            "4 million tokens, as 1024 samples of 2048"
        )
    return given, global_batch


def parse_layout(given: str | Mapping[str, Any] | Layout, trainer: Trainer = "megatron") -> Layout:
    """Read a layout from a line or a mapping; `trainer` if that names none. Raises ConfigError.

    1f1b with several chunks is what others call the interleaved schedule; zb-v has two unless told otherwise.
    """
    if isinstance(given, Layout):
        return given
    values = parse_pairs("layout", given) if isinstance(given, str) else dict(given)
    for key in values:
        if key not in layout_types():
            raise ConfigError(f"layout has no key {key!r}; {nearest(key, layout_types())}")
    if values.get("schedule", "1f1b") == "1f1b" and values.get("chunks", 1) != 1:
        values["schedule"] = "interleaved"
    if values.get("schedule") == "zb-v":
        values.setdefault("chunks", 2)
    return Layout(**{"trainer": trainer, **values})


def parse_pairs(what: str, text: str) -> dict[str, Any]:
    """Parse 'a=1,b=x,c=true' into {"a": 1, "b": "x", "c": True}. A value may have commas: order=tp,dp,pp.

    Raises ConfigError.
    """
    pairs: dict[str, Any] = {}
    for part in re.split(r",(?=[^,=]*=)", text):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"--{what} {text!r}: {part!r} should read key=value")
        if key in pairs:
            raise ConfigError(f"--{what} {text!r} says {key} twice")
        pairs[key] = _value(value)
    return pairs


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
