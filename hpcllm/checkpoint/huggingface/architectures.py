"""Architectures of Hugging Face's transformers that our decoder computes: their config.json <-> ModelConfig. Pure.

              norm        positions   feed-forward   biases    besides
    gpt2      layernorm   learned     gelu           all       tied
    gpt_neox  layernorm   rotary      gelu           all       part of the channels turn; parallel residual
    llama     rmsnorm     rotary      gated          none/all  grouped queries, stretched positions
    mistral   the same                               none      window, channels of a head
    qwen2     the same                               qkv       window, tied small ones

`read_*` asks for every key that changes the arithmetic: it is mapped, or may only have the value that we compute.
`write_*` writes all it can of any model. An architecture can express a model exactly if the result of `write_*` reads
back as the same model, and that is how it is decided. Defaults of missing keys are those of transformers; sizes have
none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcllm.checkpoint.huggingface.settings import Settings, read_rope, write_rope
from hpcllm.checkpoint.huggingface.tensor_map import GPT2, LLAMA, NEOX, Names
from hpcllm.config.rules import RANGES
from hpcllm.config.schema import ModelConfig, from_tables
from hpcllm.errors import ConfigError, HuggingFaceError

Fields = dict[str, Any]  # of ModelConfig
# sizes of ours -> theirs
_SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "vocabulary": "vocab_size", "max_sequence": "max_position_embeddings",
}  # fmt: skip
_GPT2_SIZES = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocabulary": "vocab_size",
    "max_sequence": "n_positions",
}  # fmt: skip
_LLAMA3_KEYS = ["rope_low_frequency", "rope_high_frequency", "rope_original_sequence"]
# theirs -> ours; the first of each of ours is what we write
_GELUS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
}  # fmt: skip
_GATES = {"silu": "swiglu", "swish": "swiglu"}


@dataclass(frozen=True)
class Architecture:
    kind: str  # model_type in config.json
    model_class: str  # of transformers
    names: Names
    read: Callable[[Settings], Fields]
    write: Callable[[ModelConfig], dict[str, Any]]


def read_model(settings: Settings) -> tuple[Architecture, ModelConfig]:
    """Read the architecture and model of a config.json.

    Raises HuggingFaceError for an architecture, a key or a value that we do not have.
    """
    kind = settings.only("model_type", None, tuple(ARCHITECTURES))
    settings.only("is_encoder_decoder", False, (False,))
    for key in ("quantization_config", "pruned_heads", "per_layer_config"):
        settings.only(key, None, (None, {}))
    fields = {**dataclasses.asdict(ModelConfig()), **ARCHITECTURES[kind].read(settings)}
    try:  # checked as a run file's are
        model = from_tables({"model": fields, "data": {"sequence_length": 1}}).model
        return ARCHITECTURES[kind], canonical(model)
    except ConfigError as error:
        raise HuggingFaceError(f"{settings.where}: a {kind} that cannot be: {error}") from error


def write_model(model: ModelConfig, kind: str = "") -> tuple[Architecture, dict[str, Any]]:
    """Write a model's config.json; returns its architecture too. kind: of architecture, "" for the first that can.

    Raises HuggingFaceError if none can, with the changes that each would make.
    """
    if kind and kind not in ARCHITECTURES:
        raise HuggingFaceError(f"the architecture {kind!r} is unknown; valid: {', '.join(ARCHITECTURES)}")
    faults = []
    for architecture in [ARCHITECTURES[kind]] if kind else ARCHITECTURES.values():
        said = {"architectures": [architecture.model_class], "model_type": architecture.kind}
        table = said | architecture.write(model)
        fault = _difference(model, table)
        if not fault:
            return architecture, table
        faults.append(f"{architecture.kind}: {fault}")
    raise HuggingFaceError(f"no architecture of transformers says this model; {'; '.join(faults)}")


def canonical(model: ModelConfig) -> ModelConfig:
    """Give models that compute the same one spelling: keys that follow from others, or do nothing, at their default."""
    default = ModelConfig()
    heads = model.heads * model.head_dim == model.hidden and not model.hidden % model.heads
    unused = [
        *(["rope_theta", "rope_fraction", "rope_scaling"] if model.positions == "learned" else []),
        *(["rope_factor"] if model.rope_scaling == "none" or model.positions == "learned" else []),
        *(_LLAMA3_KEYS if model.rope_scaling != "llama3" or model.positions == "learned" else []),
        *(["kv_heads"] if model.key_value_heads == model.heads else []),
        *(["head_channels"] if heads else []),
        "preset",
        "compile",
    ]
    plain = dataclasses.replace(model, **{key: getattr(default, key) for key in unused})
    return dataclasses.replace(plain, rope_fraction=plain.turned_channels / plain.head_dim)


def _difference(model: ModelConfig, table: dict[str, Any]) -> str:
    """List the keys that change if the model is written so; empty if none does."""
    try:
        _, again = read_model(Settings(table, "as config.json"))
    except HuggingFaceError as error:
        return str(error)
    before, after = (dataclasses.asdict(item) for item in (canonical(model), again))
    return ", ".join(f"{key} = {before[key]!r} would be {after[key]!r}" for key in before if before[key] != after[key])


def read_gpt2(settings: Settings) -> Fields:
    settings.only("scale_attn_weights", True, (True,))
    settings.only("scale_attn_by_inverse_layer_idx", False, (False,))
    settings.only("add_cross_attention", False, (False,))
    sizes = _read_sizes(settings, _GPT2_SIZES)
    return {
        **sizes,
        "ffn": settings.whole_or_null("n_inner", None) or 4 * sizes["hidden"],
        "norm": "layernorm",
        "norm_epsilon": settings.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "activation": _GELUS[settings.only("activation_function", "gelu_new", tuple(_GELUS))],
        "biases": "all",
        "tied": settings.flag("tie_word_embeddings", True),
    }


def write_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(model, _GPT2_SIZES),
        "n_inner": model.ffn,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": _theirs(_GELUS, model.activation),
    }


def read_neox(settings: Settings) -> Fields:
    settings.only("attention_bias", True, (True,))
    return {
        **_read_sizes(settings, _SIZES),
        **read_rope(settings, settings.whole("max_position_embeddings"), "rotary_emb_base", "rotary_pct", 0.25),
        "norm": "layernorm",
        "norm_epsilon": settings.number("layer_norm_eps", 1e-5),
        "activation": _GELUS[settings.only("hidden_act", "gelu", tuple(_GELUS))],
        "biases": "all",
        "parallel_residual": settings.flag("use_parallel_residual", True),
        "tied": settings.flag("tie_word_embeddings", False),
    }


def write_neox(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(model, _SIZES),
        **write_rope(model, "rotary_emb_base"),
        "rotary_pct": model.rope_fraction,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": _theirs(_GELUS, model.activation),
        "attention_bias": True,
        "use_parallel_residual": model.parallel_residual,
    }


def read_llama(settings: Settings) -> Fields:
    attention = settings.flag("attention_bias", False)
    settings.only("mlp_bias", False, (attention,))  # ours are all or none
    if settings.whole("hidden_size") % settings.whole("num_attention_heads"):  # Mistral's may, with head_dim
        settings.reject("num_attention_heads", "does not divide hidden_size, which transformers asks of a llama")
    return {**_read_gated(settings, None), "biases": "all" if attention else "none"}


def write_llama(model: ModelConfig) -> dict[str, Any]:
    biases = model.biases == "all"
    return {**_write_gated(model), "attention_bias": biases, "mlp_bias": biases}


def read_mistral(settings: Settings) -> Fields:
    window = settings.whole_or_null("sliding_window", 4096)
    settings.only("layer_types", None, (None,))
    return {**_read_gated(settings, 8), "window": window or 0}


def write_mistral(model: ModelConfig) -> dict[str, Any]:
    return {**_write_gated(model), "sliding_window": model.window or None}


def read_qwen2(settings: Settings) -> Fields:
    return {**_read_gated(settings, 32), "biases": "qkv", "window": _window_of_qwen2(settings)}


def _window_of_qwen2(settings: Settings) -> int:
    """Window of all layers; 0 for none. Layers from max_window_layers on have it, unless layer_types differs."""
    layers = settings.whole("num_hidden_layers", most=int(RANGES["model.layers"].most))
    is_used = settings.flag("use_sliding_window", False)
    window = settings.whole_or_null("sliding_window", 4096) if is_used else None
    first = settings.number("max_window_layers", 28)
    usual = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    kinds = settings.get("layer_types") or usual
    if kinds == ["full_attention"] * layers:
        return 0
    if kinds != ["sliding_attention"] * layers or not window:
        key = "layer_types" if settings.get("layer_types") else "max_window_layers"
        settings.reject(key, f"gives some of {layers} layers a window of {window}; valid: all of them, or none")
    return window or 0


def write_qwen2(model: ModelConfig) -> dict[str, Any]:
    window = {"use_sliding_window": bool(model.window), "sliding_window": model.window or None, "max_window_layers": 0}
    return {**_write_gated(model), **window}


def _read_gated(settings: Settings, kv_heads: int | None) -> Fields:
    """Read what Llama, Mistral and Qwen2 share. kv_heads: default of a missing key; None: as many as heads."""
    rope = read_rope(settings, settings.whole("max_position_embeddings"), "rope_theta", "partial_rotary_factor", 1.0)
    if rope["rope_fraction"] != 1:
        raise HuggingFaceError(f"partial_rotary_factor = {rope['rope_fraction']} is not of this architecture; valid: 1")
    return {
        **_read_sizes(settings, _SIZES),
        **rope,
        "kv_heads": settings.whole_or_null("num_key_value_heads", kv_heads) or 0,
        "head_channels": settings.whole_or_null("head_dim", None) or 0,
        "norm": "rmsnorm",
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "activation": _GATES[settings.only("hidden_act", "silu", tuple(_GATES))],
        "tied": settings.flag("tie_word_embeddings", False),
    }


def _write_gated(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_sizes(model, _SIZES),
        **write_rope(model, "rope_theta"),
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": _theirs(_GATES, model.activation),
    }


def _read_sizes(settings: Settings, names: dict[str, str]) -> Fields:
    """Read sizes under their names in an architecture, or under the usual ones. No default: a model has them all."""
    return {
        ours: settings.whole(key, other=_SIZES[ours], most=int(RANGES[f"model.{ours}"].most))
        for ours, key in names.items()
    }


def _write_sizes(model: ModelConfig, names: dict[str, str]) -> dict[str, Any]:
    return {theirs: getattr(model, ours) for ours, theirs in names.items()} | {"tie_word_embeddings": model.tied}


def _theirs(table: dict[str, str], ours: str) -> str:
    """Their name of an activation; ours if they have none, which does not read back."""
    return next((name for name, value in table.items() if value == ours), ours)


ARCHITECTURES = {
    architecture.kind: architecture
    for architecture in (
        Architecture("gpt2", "GPT2LMHeadModel", GPT2, read_gpt2, write_gpt2),
        Architecture("gpt_neox", "GPTNeoXForCausalLM", NEOX, read_neox, write_neox),
        Architecture("llama", "LlamaForCausalLM", LLAMA, read_llama, write_llama),
        Architecture("mistral", "MistralForCausalLM", LLAMA, read_mistral, write_mistral),
        Architecture("qwen2", "Qwen2ForCausalLM", LLAMA, read_qwen2, write_qwen2),
    )
}
