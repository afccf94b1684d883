# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""The decoder, or the part of it that one pipeline stage holds.

    tokens                                        hidden states of the stage before
       |                                                        |
    embedding (+ learned positions)                             |
       |                                                        |
       +---------------------------+----------------------------+
                                   |
         blocks first..last-1:  x = x + attention(norm(x));  x = x + ffn(norm(x))
         with a parallel residual:  x = x + attention(norm(x)) + ffn(other norm(x))
                                   |
       +---------------------------+----------------------------+
       |                                                        |
    final norm, head -> logits, loss              hidden states to the stage behind

`shapes.parameter_shapes` is the table of its parameters: `named_parameters()` gives the same names and shapes in the
same order, whichever span is held; where tp splits a parameter, its shape is that of this rank's shard (shards.py).

Shapes: B batch, T sequence, D hidden, V vocabulary, R channels of a head that turn (rotary.py). Where tp splits the
sequence, hidden states are (B, T/tp, D).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hpcllm.chunks import chunk_range
from hpcllm.config import ModelConfig
from hpcllm.model.attention import Attention
from hpcllm.model.cache import KeyValueCache
from hpcllm.model.layers import embedded, feed_forward, norm, normed
from hpcllm.model.linear import PLAIN, DeferredGradients, Linear, Pass, columns
from hpcllm.model.loss import cross_entropy_sum, cross_entropy_sum_in_pieces
from hpcllm.model.presence import ENDS, AlwaysPresent, Presence
from hpcllm.model.recompute import again
from hpcllm.model.rotary import rotary_table
from hpcllm.model.shapes import StageSpan
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, in_order


class Block(nn.Module):
    """One layer, normalised before each half so that the residual path is a plain sum."""

    def __init__(self, model: ModelConfig, number: int, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = model.parallel_residual
        self.attention_norm = norm(model)
        self.attention = Attention(model, number, tp)
        self.ffn_norm = norm(model)
        self.ffn = feed_forward(model, tp)

    def forward(
        self,
        x_BTD: Tensor,
        table_2T1R: Tensor | None,
        how: Pass = PLAIN,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """As Attention.forward; x on the residual path."""
        half_BTD: Tensor = x_BTD + self.attention(normed(self.attention_norm, x_BTD), table_2T1R, how, cache)
        ffn_BTD: Tensor = self.ffn(normed(self.ffn_norm, x_BTD if self.parallel else half_BTD), how)
        return half_BTD + ffn_BTD


class Decoder(nn.Module):
    """The span's parameters, in float32. The values are PyTorch's own; `initialisation.build` gives ours.

    With tied weights the head multiplies by `embedding.weight`: the parameter itself where the span has both ends,
    the span's own copy where it has the head alone (whose gradient must then be summed with that of stage 0).

    What may be set before a pass: `exact`, by which nothing between tensor-parallel ranks is coded; `recompute`
    (recompute.py); `loss_tokens`, of how many tokens logits exist at once in `loss_sum`, 0: of all; `presence`.
    """

    table: Tensor | None

    def __init__(self, model: ModelConfig, span: StageSpan, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.model, self.span, self.shared_by, self.exact = model, span, tp, False
        self.presence: Presence = AlwaysPresent()
        self.recompute = "none"
        self.loss_tokens = 0
        self.first_token, end = chunk_range(model.vocabulary, tp.size, tp.rank)  # of this rank's rows of the tables
        vocabulary = end - self.first_token
        self.register_buffer("table", rotary_table(model) if model.positions == "rotary" else None, persistent=False)
        if span.has_embedding:
            self.embedding = nn.Embedding(vocabulary, model.hidden)
            if model.positions == "learned":
                self.positions = nn.Embedding(model.max_sequence, model.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(model, i, tp) for i in range(span.first_block, span.last_block)})
        if span.has_head:
            self.final_norm = norm(model)
            if not model.tied:
                self.head = Linear(model.hidden, vocabulary, bias=False)
            elif not span.has_embedding:
                self.embedding = nn.Embedding(vocabulary, model.hidden)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def tp(self) -> TensorParallel:
        return dataclasses.replace(self.shared_by, codec="raw") if self.exact else self.shared_by

    def forward(self, x: Tensor, later: DeferredGradients | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """One pass through the span. Collective over tp.

        x: tokens (B, T) int64 where the span has the embedding, else hidden states (B, T, D) in the type of the
        weights; T <= max_sequence. Returns logits (B, T, V) where the span has the head, else hidden states.
        later: where the backward pass leaves the weight gradients of linear layers and head; None: in .grad.
        cache: of the tokens before x, which takes in those of x; then B, and T <= max_sequence, count both, and tp
        may not split the sequence.
        """
        hidden_BTD = self.hidden_states(x, later, cache)
        return self.logits(hidden_BTD, later) if self.span.has_head else hidden_BTD

    def hidden_states(
        self, x: Tensor, later: DeferredGradients | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(B, T, D) as they leave the span's last block. x as for `forward`. Collective over tp."""
        assert not (cache and self.tp.sequence), "new tokens are not split over ranks"
        start = cache.length if cache else 0
        end = start + x.shape[1] * (1 if self.span.has_embedding else self.tp.parts)
        x_BTD = self._embed(x, start) if self.span.has_embedding else x
        table_2T1R = None if self.table is None else self.table[:, start:end]
        how = self._how(later)
        for number, block in self.blocks.items():
            unit = f"blocks.{number}"
            x_BTD = self.presence.enter(unit, x_BTD)
            if self.recompute == "full":
                x_BTD = again(lambda x, block=block: block(x, table_2T1R, how, cache), x_BTD)  # type: ignore[misc]
            else:
                x_BTD = block(x_BTD, table_2T1R, how, cache)
            x_BTD = self.presence.leave(unit, x_BTD)
        if cache:
            cache.length = end
        return x_BTD

    def logits(self, hidden_BTD: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """(B, T, V) of this rank's part of the vocabulary, from `first_token` on; needs the head. Collective over tp.

        Apart from `hidden_states` so that a sampler can ask for one token's.
        """
        return in_order(self._logits(hidden_BTD, later), self.tp)

    def loss_sum(self, hidden_BTD: Tensor, targets_BT: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """The summed cross entropy of the whole vocabulary, as loss.cross_entropy_sum has it; needs the head.

        The same bits on all ranks of tp. Collective over tp. With `loss_tokens` the head's weight gradient comes with
        the first half of a backward pass: a second one would have to make the logits a third time.
        """
        targets_BT = as_gathered(targets_BT, self.tp)
        if not self.loss_tokens:
            return cross_entropy_sum(self._logits(hidden_BTD, later), targets_BT, self.tp, self.first_token)
        x_BTD = normed(self.final_norm, self.presence.enter(ENDS, hidden_BTD)).made()
        return cross_entropy_sum_in_pieces(x_BTD, self._head(), targets_BT, self.loss_tokens, self.tp, self.first_token)

    def _logits(self, hidden_BTD: Tensor, later: DeferredGradients | None) -> Tensor:
        """Tokens as they are gathered."""
        hidden_BTD = self.presence.enter(ENDS, hidden_BTD)
        (logits,) = columns(normed(self.final_norm, hidden_BTD), [(self._head(), None)], self._how(later))
        return logits

    def _how(self, later: DeferredGradients | None) -> Pass:
        return Pass(self.tp, later, self.recompute == "selective")

    def _head(self) -> Tensor:
        return self.embedding.weight if self.model.tied else self.head.weight

    def _embed(self, tokens_BT: Tensor, start: int) -> Tensor:
        tokens_BT = self.presence.enter(ENDS, tokens_BT)
        x_BTD = embedded(tokens_BT, self.embedding.weight, self.first_token, self.tp)
        if self.model.positions == "learned":
            if self.tp.sequence:
                start += self.tp.rank * x_BTD.shape[1]
            x_BTD = x_BTD + self.positions.weight[start : start + x_BTD.shape[1]]
        return x_BTD
