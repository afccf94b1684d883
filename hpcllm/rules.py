"""What the keys of a run file may hold: one row a key, then what must fit together. config.py checks by it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcllm.errors import ConfigError
from hpcllm.policy import traffic_codecs

if TYPE_CHECKING:
    from hpcllm.config import CommunicationConfig, Config, ModelConfig, PipelineConfig

SHARED_OUT = ("ring", "two_step", "node_window", "native")  # algorithms that give each replica its share of a sum

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
    "limits.margin_s": (">= 0", lambda v: v >= 0),
}


def check_together(config: Config) -> None:
    """Raises ConfigError for keys that are fine by themselves, but not together."""
    model, data = config.model, config.data
    if not model.head_channels and model.hidden % model.heads:
        raise ConfigError(
            f"model.hidden = {model.hidden} does not split into model.heads = {model.heads}; "
            f"valid heads: {divisors(model.hidden)}; or give model.head_channels, the channels of one head"
        )
    if model.heads % model.key_value_heads:
        raise ConfigError(
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; "
            f"valid: {divisors(model.heads)}"
        )
    turned = model.turned_channels
    if model.positions == "rotary" and (turned % 2 or not turned):
        raise ConfigError(
            f"model.rope_fraction = {model.rope_fraction} of a head's {model.head_dim} channels (model.hidden / "
            f"model.heads, or model.head_channels) is {turned}; rotary positions turn pairs: it must be even, not 0"
        )
    if model.rope_scaling == "llama3" and model.rope_low_frequency >= model.rope_high_frequency:
        raise ConfigError(
            f"model.rope_low_frequency = {model.rope_low_frequency} is not below model.rope_high_frequency = "
            f"{model.rope_high_frequency}; Llama 3 has 1 and 4"
        )
    if data.sequence_length > model.max_sequence:
        raise ConfigError(
            f"data.sequence_length = {data.sequence_length} is longer than "
            f"model.max_sequence = {model.max_sequence}; lower the one or raise the other"
        )
    if late := [step for step in config.log.trace_steps if step > config.run.steps]:
        raise ConfigError(f"log.trace_steps has {late[0]}, but run.steps = {config.run.steps}; valid: 1 to that")
    _check_pipeline(config.pipeline, model)
    _check_communication(config.communication)
    _check_shard(config)


def _check_pipeline(pipeline: PipelineConfig, model: ModelConfig) -> None:
    if (pipeline.schedule == "custom") != bool(pipeline.file):
        raise ConfigError(
            f"pipeline.schedule = {pipeline.schedule!r} with pipeline.file = {pipeline.file!r}; valid: 'custom' with "
            "the file of a schedule, or another schedule without one"
        )
    if pipeline.layers and sum(pipeline.layers) != model.layers:
        raise ConfigError(
            f"pipeline.layers = {list(pipeline.layers)} adds up to {sum(pipeline.layers)}, but model.layers = "
            f"{model.layers}; valid: numbers that add up to it, or [] to divide by cost"
        )


def _check_communication(communication: CommunicationConfig) -> None:
    gradients = traffic_codecs(communication)["gradients"]
    if communication.algorithm in ("native", "node_window") and gradients != "raw":
        raise ConfigError(
            f"communication.algorithm = {communication.algorithm!r} adds up values as they are, but the gradients "
            f"travel as {gradients!r}; valid: communication.gradients = 'raw', or another algorithm, such as 'auto'"
        )


def _check_shard(config: Config) -> None:
    shard, algorithm = config.optimizer.shard, config.communication.algorithm
    if shard == "all" and config.mesh.pp > 1:
        raise ConfigError(
            f"optimizer.shard = 'all' with mesh.pp = {config.mesh.pp}: each microbatch would gather a stage's weights "
            "anew; valid: mesh.pp = 1, or optimizer.shard = 'none', 'states' or 'states+gradients'"
        )
    if shard != "none" and algorithm not in ("auto", *SHARED_OUT):
        raise ConfigError(
            f"communication.algorithm = {algorithm!r} gives every replica the whole sum, but with optimizer.shard = "
            f"{shard!r} each gets its share; valid: auto, {', '.join(SHARED_OUT)}"
        )


def divisors(n: int) -> str:
    """'1, 2, 4, 8' for 8: the answer that an error about a remainder owes its reader; the first dozen of many."""
    low = [d for d in range(1, math.isqrt(min(n, 10**12)) + 1) if n % d == 0]
    found = sorted({*low, *(n // d for d in low)})
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
