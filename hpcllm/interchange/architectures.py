"""The architectures of Hugging Face's transformers that our decoder is: their config.json <-> ModelConfig. Pure.

              norm        positions   feed-forward   biases    besides
    gpt2      layernorm   learned     gelu           all       tied
    gpt_neox  layernorm   rotary      gelu           all       part of the channels turn; parallel residual
    llama     rmsnorm     rotary      gated          none/all  grouped queries, stretched positions
    mistral   the same                               none      window, channels of a head
    qwen2     the same                               qkv       window, tied small ones

`read` and `write` are each other's inverse: a model can be said by an architecture exactly if what `write` makes of
it reads back as the same model, and that is how it is decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcllm.config import ModelConfig, from_tables
from hpcllm.errors import ConfigError, InterchangeError
from hpcllm.interchange import descriptions, names
from hpcllm.interchange.names import Names
from hpcllm.interchange.settings import Settings

Fields = dict[str, Any]  # of ModelConfig
_LLAMA3_KEYS = ["rope_low_frequency", "rope_high_frequency", "rope_original_sequence"]


@dataclass(frozen=True)
class Architecture:
    kind: str  # model_type in config.json
    model_class: str  # of transformers
    names: Names
    read: Callable[[Settings], Fields]
    write: Callable[[ModelConfig], dict[str, Any]]


def read_model(settings: Settings) -> tuple[Architecture, ModelConfig]:
    """What a config.json describes. Raises InterchangeError: an architecture, a key or a value that we do not have."""
    kind = settings.only("model_type", None, tuple(ARCHITECTURES))
    settings.only("quantization_config", None, (None, {}))
    settings.only("is_encoder_decoder", False, (False,))
    settings.only("pruned_heads", None, (None, {}))
    settings.only("per_layer_config", None, (None, {}))
    architecture = ARCHITECTURES[kind]
    fields = architecture.read(settings)
    try:
        return architecture, canonical(_model(fields))
    except ConfigError as error:
        raise InterchangeError(f"{settings.where}: a {kind} that cannot be: {error}") from error


def write_model(model: ModelConfig, kind: str = "") -> tuple[Architecture, dict[str, Any]]:
    """The architecture that says the model, and its config.json. kind: ask for one; "": the first that can.

    Raises InterchangeError if none can, with what each would turn it into.
    """
    if kind and kind not in ARCHITECTURES:
        raise InterchangeError(f"the architecture {kind!r} is unknown; valid: {', '.join(ARCHITECTURES)}")
    faults = []
    for architecture in [ARCHITECTURES[kind]] if kind else ARCHITECTURES.values():
        table = {
            "architectures": [architecture.model_class],
            "model_type": architecture.kind,
            **architecture.write(model),
        }
        fault = _difference(model, table)
        if not fault:
            return architecture, table
        faults.append(f"{architecture.kind}: {fault}")
    raise InterchangeError(f"no architecture of transformers says this model; {'; '.join(faults)}")


def canonical(model: ModelConfig) -> ModelConfig:
    """One spelling of models that compute the same: keys that follow from others, or do nothing, at their default."""
    default = ModelConfig()
    heads = model.heads * model.head_dim == model.hidden and not model.hidden % model.heads
    unused = [
        *(["rope_theta", "rope_fraction", "rope_scaling"] if model.positions == "learned" else []),
        *(["rope_factor"] if model.rope_scaling == "none" or model.positions == "learned" else []),
        *(_LLAMA3_KEYS if model.rope_scaling != "llama3" or model.positions == "learned" else []),
        *(["kv_heads"] if model.key_value_heads == model.heads else []),
        *(["head_channels"] if heads else []),
        "preset",
    ]
    plain = dataclasses.replace(model, **{key: getattr(default, key) for key in unused})
    return dataclasses.replace(plain, rope_fraction=plain.turned_channels / plain.head_dim)


def _model(fields: Fields) -> ModelConfig:
    """Checked as a run file's is. Raises ConfigError."""
    tables = {"model": {**dataclasses.asdict(ModelConfig()), **fields}, "data": {"sequence_length": 1}}
    return from_tables(tables).model


def _difference(model: ModelConfig, table: dict[str, Any]) -> str:
    """What becomes of the model if it is written so; empty if it stays what it is."""
    try:
        _, again = read_model(Settings(table, "as config.json"))
    except InterchangeError as error:
        return str(error)
    before, after = (dataclasses.asdict(item) for item in (canonical(model), again))
    return ", ".join(f"{key} = {before[key]!r} would be {after[key]!r}" for key in before if before[key] != after[key])


ARCHITECTURES = {
    architecture.kind: architecture
    for architecture in (
        Architecture("gpt2", "GPT2LMHeadModel", names.GPT2, descriptions.read_gpt2, descriptions.write_gpt2),
        Architecture("gpt_neox", "GPTNeoXForCausalLM", names.NEOX, descriptions.read_neox, descriptions.write_neox),
        Architecture("llama", "LlamaForCausalLM", names.LLAMA, descriptions.read_llama, descriptions.write_llama),
        Architecture(
            "mistral", "MistralForCausalLM", names.LLAMA, descriptions.read_mistral, descriptions.write_mistral
        ),
        Architecture("qwen2", "Qwen2ForCausalLM", names.LLAMA, descriptions.read_qwen2, descriptions.write_qwen2),
    )
}
