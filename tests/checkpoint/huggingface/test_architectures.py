"""A config.json of either version gives the model that it means; what changes the arithmetic is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from hpcllm.checkpoint.huggingface.architectures import ARCHITECTURES, canonical, read_model, write_model
from hpcllm.checkpoint.huggingface.settings import Settings
from hpcllm.config.schema import ModelConfig
from hpcllm.errors import HuggingFaceError
from tests.model.variants import VARIANTS

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"vocab_size": 50, "max_position_embeddings": 128}
LLAMA = SIZES | {"model_type": "llama", "rope_theta": 5e5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
NEOX = SIZES | {"model_type": "gpt_neox"}
QWEN = SIZES | {"model_type": "qwen2", "num_key_value_heads": 2}
WINDOW = {"sliding_window": 16, "use_sliding_window": True}
MISTRAL = SIZES | {"model_type": "mistral", "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 64}


def read(table: dict) -> ModelConfig:
    return read_model(Settings(table, "config.json"))[1]


SAME = {
    "theta": (LLAMA, SIZES | {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        LLAMA | {"rope_theta": 1.5, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
    "linear, called type": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}},
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000}},
    ),
    "neox": (
        NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 20000},
        NEOX | {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    ),
    "neox, as usual": (NEOX, NEOX | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True}),
    "as many key heads": (LLAMA, LLAMA | {"num_key_value_heads": 4, "head_dim": 8, "rope_scaling": None}),
    "names of attributes": (
        GPT2,
        {"model_type": "gpt2", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
        | {"vocab_size": 50, "max_position_embeddings": 64},
    ),
    "gpt2, as usual": (GPT2, GPT2 | {"n_inner": 128, "activation_function": "gelu_fast", "tie_word_embeddings": True}),
    "qwen2 without its window": (QWEN, QWEN | WINDOW | {"use_sliding_window": False, "max_window_layers": 1}),
    "qwen2, a window that no layer has": (QWEN, QWEN | WINDOW | {"max_window_layers": 2}),
    "qwen2, kinds of layers": (
        QWEN | WINDOW | {"max_window_layers": 0},
        QWEN | WINDOW | {"layer_types": ["sliding_attention"] * 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_two_ways_to_say_a_model(case):
    one, other = SAME[case]
    assert read(one) == read(other)


def test_what_is_said_is_what_is_meant():
    model = read(LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "num_key_value_heads": 2})
    assert (model.rope_theta, model.rope_factor, model.rope_original_sequence) == (5e5, 8.0, 32)
    assert (model.kv_heads, model.ffn, model.max_sequence, model.tied) == (2, 64, 128, False)
    assert read(MISTRAL).window == 4096  # what transformers takes for a missing key
    assert read(QWEN | WINDOW | {"max_window_layers": 0}).window == 16
    assert read(NEOX).turned_channels == 2


REFUSED = {
    "an architecture": ({"model_type": "bert"}, "model_type = 'bert'"),
    "none": ({}, "model_type is missing"),
    "a missing size": ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size is missing"),
    "a size in quotes": (LLAMA | {"hidden_size": "32"}, "hidden_size = '32'"),
    "a size of true": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers = True"),
    "layers without end": (LLAMA | {"num_hidden_layers": 10**15}, "num_hidden_layers"),
    "heads that do not divide": (LLAMA | {"num_attention_heads": 5}, "num_attention_heads = 5"),
    "key heads that do not divide": (LLAMA | {"num_key_value_heads": 3}, "kv_heads"),
    "an activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "an activation of gpt2": (GPT2 | {"activation_function": "relu"}, "activation_function = 'relu'"),
    "scores not scaled": (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights = False"),
    "scores scaled by layer": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "cross attention": (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
    "some biases": (LLAMA | {"attention_bias": True}, "mlp_bias is missing"),
    "other biases": (LLAMA | {"mlp_bias": True}, "mlp_bias = True"),
    "neox without biases": (NEOX | {"attention_bias": False}, "attention_bias = False"),
    "yarn": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    "dynamic": (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type = 'dynamic'"),
    "llama3 without its numbers": (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "a factor below one": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor = 0.5"),
    "no factor": (LLAMA | {"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor = nan"),
    "angles of kinds of layers": (LLAMA | {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    "angles in a list": (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
    "part of the channels": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "layers of two kinds": (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers = 1"),
    "layers of two kinds, listed": (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "a window without a window": (QWEN | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    "mistral with kinds of layers": (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types"),
    "an infinite number": (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    "a huge number": (LLAMA | {"rope_theta": 10**400}, "rope_theta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_we_do_not_compute_is_refused_by_name(case):
    table, said = REFUSED[case]
    with pytest.raises(HuggingFaceError, match=said):
        read(table)


def test_keys_that_nobody_knows_are_told_and_harmless_ones_are_not():
    settings = Settings(LLAMA | {"attention_dropout": 0.1, "use_cache": True, "attn_soft_cap": 30.0, "odd": None}, "c")
    read_model(settings)
    assert settings.unknown_keys() == ["attn_soft_cap"]


SAID_BY = {"gpt2": "gpt2", "neox": "gpt_neox", "qwen": "qwen2"}
SAID_BY |= dict.fromkeys(["llama", "grouped, tied", "llama 3.1"], "llama")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_said_by_an_architecture_or_refused_with_the_reason(variant):
    model = VARIANTS[variant]
    if variant in SAID_BY:
        architecture, table = write_model(model)
        assert architecture.kind == SAID_BY[variant]
        assert read(table) == canonical(model)
    else:
        with pytest.raises(HuggingFaceError, match=r"gpt2:.*gpt_neox:.*llama:.*mistral:.*qwen2:"):
            write_model(model)


def test_a_window_alone_is_mistral_and_so_is_what_is_asked_for():
    assert write_model(dataclasses.replace(VARIANTS["llama"], window=4))[0].kind == "mistral"
    assert write_model(VARIANTS["llama"], "mistral")[0].kind == "mistral"
    with pytest.raises(HuggingFaceError, match=r"window = 4 would be 0"):
        write_model(dataclasses.replace(VARIANTS["llama"], window=4), "llama")
    with pytest.raises(HuggingFaceError, match="'bloom' is unknown; valid: gpt2"):
        write_model(VARIANTS["llama"], "bloom")


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_architecture_turns_a_model_into_another(kind, variant):
    """Whatever is written reads back as the same model, or is not written."""
    try:
        _, table = write_model(VARIANTS[variant], kind)
    except HuggingFaceError:
        return
    assert read(table) == canonical(VARIANTS[variant])
