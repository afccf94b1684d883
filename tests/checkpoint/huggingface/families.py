"""Tiny models of `transformers` at random initialisation, one for every choice that an architecture leaves open."""

from __future__ import annotations

import torch
import transformers
from torch import nn

SEQUENCE = 29
ROTARY = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 80}
ROTARY |= {"vocab_size": 97, "max_position_embeddings": 32, "initializer_range": 0.2}
ROTARY |= {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 97, "n_positions": 32, "initializer_range": 0.2}
GPT2 |= {"bos_token_id": 3, "eos_token_id": 3}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

FAMILIES = {
    "gpt2": ("GPT2", GPT2 | {"n_inner": 80}),
    "gpt2 untied, exact gelu": ("GPT2", GPT2 | {"activation_function": "gelu", "tie_word_embeddings": False}),
    "llama 2": ("Llama", ROTARY),
    "llama 3, beyond its first length": (
        "Llama",
        ROTARY
        | {"num_key_value_heads": 2, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8}},
    ),
    "llama stretched, tied, one key head": (
        "Llama",
        ROTARY
        | {"num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama with biases": ("Llama", ROTARY | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "mistral, window in the sequence": ("Mistral", ROTARY | {"num_key_value_heads": 3, "sliding_window": 7}),
    "mistral, heads of their own width": (
        "Mistral",
        ROTARY | {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 10},
    ),
    "qwen2 tied": ("Qwen2", ROTARY | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2, every layer with a window": (
        "Qwen2",
        ROTARY
        | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "neox": (
        "GPTNeoX",
        ROTARY | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "neox, one after the other, all channels turn": (
        "GPTNeoX",
        ROTARY
        | {"use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 1.0}},
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """The model in evaluation mode; norms and biases off their trivial values."""
    family, settings = FAMILIES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    for parameter, weight in model.named_parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, mean=float("bias" not in parameter), std=0.3)
    return model


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def tokens() -> torch.Tensor:
    return torch.randint(97, (3, SEQUENCE), generator=torch.Generator().manual_seed(1))
