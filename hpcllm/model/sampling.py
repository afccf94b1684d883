"""Text from a decoder, one token after the other.

    prompt + what was made so far --> last max_sequence tokens --> decoder --> logits of the next token --+
       ^                                                                                                  |
       +----------------------- token <-- draw from softmax(top k logits / temperature) <-----------------+

Each token costs a whole forward pass of the window; nothing of the pass before is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcllm.errors import ConfigError, DataError
from hpcllm.model.transformer import Decoder


def generate(
    decoder: Decoder,
    prompt_tokens: list[int],
    new_tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    stop: int | None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield up to new_tokens tokens that continue the prompt; ends before `stop` would be yielded.

    decoder: a whole model, with both ends. temperature 0 takes the likeliest token; top_k 0 draws from all ids that
    stand for text: the first `vocabulary` (default: the model's). Same generator state: same tokens. Raises DataError
    for an empty prompt or a token outside the vocabulary, ConfigError for a setting out of range, both before the
    first token.
    """
    vocabulary = min(vocabulary or decoder.model.vocabulary, decoder.model.vocabulary)
    if not prompt_tokens:
        raise DataError("the prompt has no tokens; give at least one, for example the end-of-text token")
    if outside := [token for token in prompt_tokens if not 0 <= token < vocabulary]:
        raise DataError(f"prompt token {outside[0]} is outside the vocabulary; valid: 0 to {vocabulary - 1}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature = {temperature} is out of range; valid: 0 (the likeliest token) or more")
    if top_k < 0 or new_tokens < 0:
        raise ConfigError(f"top_k = {top_k}, new_tokens = {new_tokens}: neither can be negative; top_k 0 means all")
    return _continue(decoder, list(prompt_tokens), new_tokens, temperature, top_k, generator, stop, vocabulary)


def next_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """(vocabulary,) float32: of the token that follows `tokens`, of which the last max_sequence count."""
    window = torch.tensor([tokens[-decoder.model.max_sequence :]])
    with torch.inference_mode():
        return decoder.logits(decoder.hidden_states(window)[:, -1:])[0, 0]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token from (vocabulary,) logits; temperature and top_k as for `generate`."""
    if temperature == 0:
        return int(logits.argmax())
    # float64, and relative to the largest: no temperature above 0 is so small that it gives inf - inf or 0 / 0
    best = torch.topk(logits.double(), min(top_k or logits.numel(), logits.numel()))
    weights = torch.softmax((best.values - best.values[0]) / temperature, dim=-1)
    return int(best.indices[torch.multinomial(weights, 1, generator=generator)])


def _continue(
    decoder: Decoder,
    tokens: list[int],
    new_tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    stop: int | None,
    vocabulary: int,
) -> Iterator[int]:
    for _ in range(new_tokens):
        token = draw(next_logits(decoder, tokens)[:vocabulary], temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token
