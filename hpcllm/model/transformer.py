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
    final norm, head -> logits                    hidden states to the stage behind

`shapes.parameter_shapes` is the table of its parameters: `named_parameters()` gives the same names and shapes in the
same order, whichever span is held.

Shapes: B batch, T sequence, D hidden, V vocabulary, R channels of a head that turn (rotary.py).
"""

from __future__ import annotations

from torch import Tensor, nn

from hpcllm.config import ModelConfig
from hpcllm.model.attention import Attention
from hpcllm.model.cache import KeyValueCache
from hpcllm.model.layers import feed_forward, norm
from hpcllm.model.linear import DeferredGradients, Linear, linear
from hpcllm.model.presence import ENDS, AlwaysPresent, Presence
from hpcllm.model.rotary import rotary_table
from hpcllm.model.shapes import StageSpan


class Block(nn.Module):
    """One layer, normalised before each half so that the residual path is a plain sum."""

    def __init__(self, model: ModelConfig, number: int) -> None:
        super().__init__()
        self.parallel = model.parallel_residual
        self.attention_norm = norm(model)
        self.attention = Attention(model, number)
        self.ffn_norm = norm(model)
        self.ffn = feed_forward(model)

    def forward(
        self,
        x_BTD: Tensor,
        table_2T1R: Tensor | None,
        later: DeferredGradients | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """As Attention.forward; x on the residual path."""
        half_BTD: Tensor = x_BTD + self.attention(self.attention_norm(x_BTD), table_2T1R, later, cache)
        return half_BTD + self.ffn(self.ffn_norm(x_BTD if self.parallel else half_BTD), later)


class Decoder(nn.Module):
    """The span's parameters, in float32. The values are PyTorch's own; `initialisation.build` gives ours.

    With tied weights the head multiplies by `embedding.weight`: the parameter itself where the span has both ends,
    the span's own copy where it has the head alone (whose gradient must then be summed with that of stage 0).
    """

    table: Tensor | None

    def __init__(self, model: ModelConfig, span: StageSpan) -> None:
        super().__init__()
        self.model, self.span = model, span
        self.presence: Presence = AlwaysPresent()
        self.register_buffer("table", rotary_table(model) if model.positions == "rotary" else None, persistent=False)
        if span.has_embedding:
            self.embedding = nn.Embedding(model.vocabulary, model.hidden)
            if model.positions == "learned":
                self.positions = nn.Embedding(model.max_sequence, model.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(model, i) for i in range(span.first_block, span.last_block)})
        if span.has_head:
            self.final_norm = norm(model)
            if not model.tied:
                self.head = Linear(model.hidden, model.vocabulary, bias=False)
            elif not span.has_embedding:
                self.embedding = nn.Embedding(model.vocabulary, model.hidden)

    def forward(self, x: Tensor, later: DeferredGradients | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """One pass through the span.

        x: tokens (B, T) int64 where the span has the embedding, else hidden states (B, T, D) float32;
        T <= max_sequence. Returns logits (B, T, V) float32 where the span has the head, else hidden states.
        later: where the backward pass leaves the weight gradients of linear layers and head; None: in .grad.
        cache: of the tokens before x, which takes in those of x; then B, and T <= max_sequence, count both.
        """
        hidden_BTD = self.hidden_states(x, later, cache)
        return self.logits(hidden_BTD, later) if self.span.has_head else hidden_BTD

    def hidden_states(
        self, x: Tensor, later: DeferredGradients | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(B, T, D) float32, as they leave the span's last block. x as for `forward`."""
        start = cache.length if cache else 0
        end = start + x.shape[1]
        x_BTD = self._embed(x, start) if self.span.has_embedding else x
        table_2T1R = None if self.table is None else self.table[:, start:end]
        for number, block in self.blocks.items():
            unit = f"blocks.{number}"
            x_BTD = self.presence.enter(unit, x_BTD)
            x_BTD = self.presence.leave(unit, block(x_BTD, table_2T1R, later, cache))
        if cache:
            cache.length = end
        return x_BTD

    def logits(self, hidden_BTD: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """(B, T, V) float32; needs the head. Apart from `hidden_states` so that a sampler can ask for one token's."""
        hidden_BTD = self.presence.enter(ENDS, hidden_BTD)
        weight_VD = self.embedding.weight if self.model.tied else self.head.weight
        return linear(self.final_norm(hidden_BTD), weight_VD, None, later)

    def _embed(self, tokens_BT: Tensor, start: int) -> Tensor:
        tokens_BT = self.presence.enter(ENDS, tokens_BT)
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.model.positions == "learned":
            x_BTD = x_BTD + self.positions.weight[start : start + tokens_BT.shape[1]]
        return x_BTD
