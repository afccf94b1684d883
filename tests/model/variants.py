"""Small models that together take every choice of ModelConfig, for laws that hold for all of them."""

from __future__ import annotations

import torch

from hpcllm.config import ModelConfig
from hpcllm.model.shapes import StageSpan

SMALL = {"layers": 4, "hidden": 24, "heads": 6, "ffn": 40, "vocabulary": 61, "max_sequence": 17}
GPT2 = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": True}
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False}

VARIANTS = {
    "gpt2": ModelConfig(**SMALL, **GPT2),
    "llama": ModelConfig(**SMALL, **LLAMA, tied=False),
    "grouped, tied": ModelConfig(**SMALL, **LLAMA, kv_heads=2),
    "one key head, exact gelu": ModelConfig(
        **SMALL, **(GPT2 | {"positions": "rotary", "activation": "gelu"}), kv_heads=1, tied=False
    ),
    "gated with biases": ModelConfig(**SMALL, **(GPT2 | {"norm": "rmsnorm", "activation": "swiglu"}), kv_heads=3),
}


def whole(model: ModelConfig) -> StageSpan:
    return StageSpan(0, model.layers, has_embedding=True, has_head=True)


def random_tokens(model: ModelConfig, batch: int, sequence: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocabulary, (batch, sequence), generator=generator)
