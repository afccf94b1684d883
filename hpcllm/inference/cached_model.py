"""One pass of a model, or of this rank's part of it: unread tokens of several texts -> a new token for each.

a  12 new tokens --+
b   1              +-- one row of 14 --> decoder --> logits of the last token of each --> draw
c   1            --+        |  ^
                          blocks of paged_cache.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpcllm.inference.batch import Text
from hpcllm.model.paged_cache import BLOCK_TOKENS, CachedPass, PagedCache, side_by_side
from hpcllm.model.sampling import Sampling, draw
from hpcllm.model.token_pass import TokenPass, one_thread, suits
from hpcllm.model.transformer import Decoder, run_block

# called with the logits (texts, at least the vocabulary) of a pass, its texts, and the tokens drawn for them
Observe = Callable[[Tensor, Sequence[Text], Sequence[int]], None]


def block_bytes(decoder: Decoder) -> int:
    """Return the bytes of one block in all layers that this rank holds."""
    heads, size = decoder.model.key_value_heads // decoder.tp.size, decoder.dtype.itemsize
    return 2 * len(decoder.blocks) * heads * BLOCK_TOKENS * decoder.model.head_dim * size


class CachedModel:
    """A decoder, or one stage of it, with the keys and values of texts; `next_tokens` of a model in one process."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        sampling: Sampling,
        vocabulary: int,
        observe: Observe = lambda *_: None,
    ) -> None:
        """vocabulary: ids below this stand for text; no other is drawn. observe: where tokens are drawn."""
        self.decoder, self.sampling, self.vocabulary, self.observe = decoder, sampling, vocabulary, observe
        heads = decoder.model.key_value_heads // decoder.tp.size
        like = torch.empty(0, dtype=decoder.dtype, device=decoder.device)
        self.cache = PagedCache(map(int, decoder.blocks), blocks, heads, decoder.model.head_dim, like)
        self.token_pass = TokenPass(decoder, self.cache) if suits(decoder) else None

    def next_tokens(self, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        """Read what is unread of each text and draw a token for each (batch.NextTokens). Raises NonFiniteError."""
        return self.draw(self.read(self.unread(texts), texts), texts, uniforms)

    def unread(self, texts: Sequence[Text]) -> Tensor:
        """Return the tokens of a pass (N,), those of one text behind those of the other."""
        return torch.tensor([token for text in texts for token in text.unread], device=self.decoder.device)

    def read(self, x: Tensor, texts: Sequence[Text]) -> Tensor:
        """Read N tokens: returns (N, hidden), or, with the head, (texts, this rank's vocabulary), of what follows.

        x: (N,) int64 with the embedding, else the (N, hidden) of the stage before; on the decoder's device, as is what
        this returns. Collective over the decoder's tp.
        """
        starts, counts = [text.read for text in texts], [len(text.unread) for text in texts]
        blocks = [text.blocks for text in texts]
        with torch.inference_mode():
            if self.token_pass and len(x) == len(texts) <= self.token_pass.most_texts:
                return self.token_pass.run(x, side_by_side(blocks), np.array(starts))
            here = CachedPass(self.cache, starts, counts, blocks, self.decoder.model.window)
            hidden = self.decoder.hidden_states(x.unsqueeze(0), cache=here)
            if not self.decoder.span.has_head:
                return hidden[0]
            return self.decoder.logits(hidden if max(counts) == 1 else hidden[:, here.last_rows])[0]

    def draw(self, logits: Tensor, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        """Draw from logits (texts, at least the vocabulary). Raises NonFiniteError."""
        with torch.inference_mode(), one_thread() if self.token_pass else nullcontext():
            histories = [text.after(0) for text in texts] if self.sampling.repetition_penalty != 1 else []
            tokens = draw(logits[:, : self.vocabulary], self.sampling, uniforms, histories)
            self.observe(logits, texts, tokens)
            return tokens


@contextmanager
def plain_arithmetic(decoders: Sequence[Decoder]) -> Iterator[None]:
    """Let the decoders of a run pass without codecs, split sequences, and blocks compiled for each length."""
    before = [(decoder.exact, decoder.shared_by, decoder.run_block) for decoder in decoders]
    for decoder in decoders:
        decoder.exact, decoder.run_block = True, run_block
        decoder.shared_by = replace(decoder.shared_by, sequence=False)
    try:
        yield
    finally:
        for decoder, (exact, shared_by, block) in zip(decoders, before, strict=True):
            decoder.exact, decoder.shared_by, decoder.run_block = exact, shared_by, block
