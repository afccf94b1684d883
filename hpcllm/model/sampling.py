"""Text from a decoder, one token after the other.

    prompt --> decoder --> logits of the next token --> draw from softmax(top k logits / temperature) --+--> token
                 |  ^                                                                                  |
               cache of keys and values          the new token alone <----------------------------------+

Each token costs one token's work: what was read before lies in the cache. When that holds max_sequence tokens, the
last half of them, the newest included, is read afresh: the text goes on from there, and a token's cost stays the same.

    max_sequence 8    read   a b c d e f g h | f g h i | j | k | l | m | k l m n | o | ...     i, n: the cache was full
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcllm.errors import ConfigError, DataError, NonFiniteError
from hpcllm.model.attention import KeyValueCache
from hpcllm.model.transformer import Decoder

# (tokens to read now, whether to forget all that was read before) -> the token that follows
NextToken = Callable[[list[int], bool], int]


@dataclass(frozen=True)
class TokenSampler:
    """Draws tokens from logits.

    temperature 0 takes the likeliest; top_k 0 draws from all ids that stand for text, the first `vocabulary`.
    """

    temperature: float
    top_k: int
    vocabulary: int
    generator: torch.Generator

    def token(self, logits: Tensor) -> int:
        """Draw from (at least vocabulary,) logits of any type. Same logits and generator state, same token.

        Drawn on the CPU: the token is wanted there anyway, and so the generator is the same for every device.
        Raises NonFiniteError for logits that are no numbers.
        """
        logits = logits[: self.vocabulary].cpu()
        if not bool(logits.isfinite().all()):
            raise NonFiniteError(
                "the logits of the next token are not finite: the weights hold NaN or infinite values, or overflow in "
                "this --precision; `checkpoint inspect` shows which tensors"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        # float64, and relative to the largest: no temperature above 0 is so small that it gives inf - inf or 0 / 0
        best = torch.topk(logits.double(), min(self.top_k or logits.numel(), logits.numel()))
        weights = torch.softmax((best.values - best.values[0]) / self.temperature, dim=-1)
        return int(best.indices[torch.multinomial(weights, 1, generator=self.generator)])


class CachedDecoder:
    """A decoder, or one stage of it, with the keys and values of the tokens that it has read."""

    def __init__(self, decoder: Decoder, most_tokens: int) -> None:
        """most_tokens: most that will ever be read at once; more than max_sequence never are."""
        self.decoder = decoder
        model, weight = decoder.model, next(decoder.parameters())
        heads = model.key_value_heads // decoder.tp.size
        shape = (1, min(most_tokens, model.max_sequence), heads, model.head_dim)
        self._cache = KeyValueCache(map(int, decoder.blocks), shape, weight.detach())

    def read(self, x: Tensor, afresh: bool) -> Tensor:
        """Read T new tokens: (T, hidden), or, with the head, logits of the next one: (this rank's vocabulary,).

        x: (T,) int64 with the embedding, else the (T, hidden) of the stage before; on the decoder's device, as is what
        this returns. Collective over the decoder's tp.
        """
        if afresh:
            self._cache.length = 0
        with torch.inference_mode():
            hidden = self.decoder.hidden_states(x.unsqueeze(0), cache=self._cache)
            if not self.decoder.span.has_head:
                return hidden[0]
            return self.decoder.logits(hidden[:, -1:])[0, 0]


def local_next_token(decoder: Decoder, sampler: TokenSampler, most_tokens: int) -> NextToken:
    """Return the NextToken of a whole model in one process; most_tokens as for CachedDecoder."""
    reader = CachedDecoder(decoder, most_tokens)
    return lambda tokens, afresh: sampler.token(reader.read(torch.tensor(tokens, device=decoder.device), afresh))


def check_prompt(tokens: list[int], vocabulary: int) -> None:
    """Check a prompt. Raises DataError for an empty prompt or a token outside the vocabulary."""
    if not tokens:
        raise DataError("the prompt has no tokens; give at least one, for example the end-of-text token")
    if outside := [token for token in tokens if not 0 <= token < vocabulary]:
        raise DataError(f"prompt token {outside[0]} is outside the vocabulary; valid: 0 to {vocabulary - 1}")


def check_settings(new_tokens: int, temperature: float, top_k: int) -> None:
    """Check the settings of `generate`. Raises ConfigError for one that is out of range."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature = {temperature} is out of range; valid: 0 (the likeliest token) or more")
    if top_k < 0 or new_tokens < 0:
        raise ConfigError(f"top_k = {top_k}, new_tokens = {new_tokens}: neither can be negative; top_k 0 means all")


def generate(
    next_token: NextToken, prompt_tokens: list[int], new_tokens: int, max_sequence: int, stops: Collection[int] = ()
) -> Iterator[int]:
    """Yield up to new_tokens tokens that continue the prompt; ends before one of `stops` would be yielded.

    Of a longer prompt the last max_sequence tokens count.
    """
    tokens, unread, held = list(prompt_tokens), prompt_tokens[-max_sequence:], 0
    for _ in range(new_tokens):
        token = next_token(unread, held == 0)
        if token in stops:
            return
        yield token
        tokens.append(token)
        held += len(unread)
        unread = [token]
        if held == max_sequence:
            held, unread = 0, tokens[-max(max_sequence // 2, 1) :]
