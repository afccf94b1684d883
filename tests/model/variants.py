"""Small models that together take every choice of ModelConfig, for laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcllm.config.schema import ModelConfig
from hpcllm.model.paged_cache import BlockPool, CachedPass, PagedCache, blocks_for
from hpcllm.model.shapes import StageSpan
from hpcllm.model.transformer import Decoder

SMALL = {"layers": 4, "hidden": 24, "heads": 6, "ffn": 40, "vocabulary": 61, "max_sequence": 17}
GPT2 = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": "all"}
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": "none"}

VARIANTS = {
    "gpt2": ModelConfig(**SMALL, **GPT2),
    "llama": ModelConfig(**SMALL, **LLAMA, tied=False),
    "grouped, tied": ModelConfig(**SMALL, **LLAMA, kv_heads=2),
    "one key head, exact gelu": ModelConfig(
        **SMALL, **(GPT2 | {"positions": "rotary", "activation": "gelu"}), kv_heads=1, tied=False
    ),
    "gated with biases": ModelConfig(**SMALL, **(GPT2 | {"norm": "rmsnorm", "activation": "swiglu"}), kv_heads=3),
    "neox": ModelConfig(
        **SMALL,
        **(GPT2 | {"positions": "rotary", "activation": "gelu"}),
        tied=False,
        parallel_residual=True,
        rope_fraction=0.5,
    ),
    "qwen": ModelConfig(**SMALL, **(LLAMA | {"biases": "qkv"}), kv_heads=2, head_channels=8, window=5),
    "llama 3.1": ModelConfig(
        **SMALL, **LLAMA, kv_heads=2, tied=False, rope_scaling="llama3", rope_factor=8.0, rope_original_sequence=16
    ),
}


def whole(model: ModelConfig) -> StageSpan:
    return StageSpan(0, model.layers, has_embedding=True, has_head=True)


def random_tokens(model: ModelConfig, batch: int, sequence: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocabulary, (batch, sequence), generator=generator)


def stirred(decoder: Decoder) -> Decoder:
    """Biases off zero, norms off one, weights large: an error in any of them must show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(decoder.named_parameters()):
            generator.manual_seed(sum(name.encode()))
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return decoder


def cached_logits(decoder: Decoder, tokens: torch.Tensor, cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Logits (B, T, V) of rows of tokens (B, T) that are read in pieces: all rows' pieces of a cut in one pass.

    Blocks are handed out by turns, so that those of a row lie apart.
    """
    rows, model = len(tokens), decoder.model
    pool = BlockPool(rows * blocks_for(tokens.shape[1]))
    heads = model.key_value_heads // decoder.tp.size
    like = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
    cache = PagedCache(map(int, decoder.blocks), pool.blocks, heads, model.head_dim, like)
    tables: list[list[int]] = [[] for _ in range(rows)]
    found = []
    for start, end in cuts:
        assert all(pool.grow(table, end) for table in tables)
        here = CachedPass(cache, [start] * rows, [end - start] * rows, tables, model.window)
        with torch.inference_mode():
            row = tokens[:, start:end].reshape(1, -1)
            found.append(decoder.logits(decoder.hidden_states(row, cache=here)).view(rows, end - start, -1))
    return torch.cat(found, 1)
