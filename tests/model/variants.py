"""Small models that together take every choice of ModelConfig, for laws that hold for all of them."""

from __future__ import annotations

import torch

from hpcllm.config import ModelConfig
from hpcllm.model.shapes import StageSpan

SMALL = {"layers": 4, "hidden": 24, "heads": 6, "ffn": 40, "vocabulary": 61, "max_sequence": 17}

VARIANTS = {
    "gpt2": ModelConfig(**SMALL),
    "llama": ModelConfig(**SMALL, norm="rmsnorm", positions="rotary", activation="swiglu", tied=False, biases=False),
    "grouped, tied": ModelConfig(
        **SMALL, kv_heads=2, norm="rmsnorm", positions="rotary", activation="swiglu", biases=False
    ),
    "one key head, exact gelu": ModelConfig(**SMALL, kv_heads=1, positions="rotary", activation="gelu", tied=False),
    "gated with biases": ModelConfig(**SMALL, kv_heads=3, norm="rmsnorm", activation="swiglu"),
}


def whole(model: ModelConfig) -> StageSpan:
    return StageSpan(0, model.layers, has_embedding=True, has_head=True)


def random_tokens(model: ModelConfig, batch: int, sequence: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocabulary, (batch, sequence), generator=generator)
