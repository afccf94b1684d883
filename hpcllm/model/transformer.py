# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""The decoder, or the part of it that one pipeline stage holds.

    tokens                                        hidden states of the stage before
       |                                                        |
    embedding (+ learned positions)                             |
       |                                                        |
       +---------------------------+----------------------------+
                                   |
         blocks first..last-1:  x = x + attention(norm(x));  x = x + ffn(norm(x))
                                   |
       +---------------------------+----------------------------+
       |                                                        |
    final norm, head -> logits                    hidden states to the stage behind

`shapes.parameter_shapes` is the table of its parameters: `named_parameters()` gives the same names and shapes in the
same order, whichever span is held.

Shapes: B batch, T sequence, D hidden, V vocabulary, K channels a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from hpcllm.config import ModelConfig
from hpcllm.model.attention import Attention, rotary_table
from hpcllm.model.layers import feed_forward, norm
from hpcllm.model.linear import DeferredGradients, Linear, linear
from hpcllm.model.shapes import StageSpan


class Block(nn.Module):
    """One layer, normalised before each half so that the residual path is a plain sum (GPT-2, Llama)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = norm(model)
        self.attention = Attention(model)
        self.ffn_norm = norm(model)
        self.ffn = feed_forward(model)

    def forward(self, x_BTD: Tensor, table_2T1K: Tensor | None, later: DeferredGradients | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table_2T1K, later)
        y_BTD: Tensor = x_BTD + self.ffn(self.ffn_norm(x_BTD), later)
        return y_BTD


class Decoder(nn.Module):
    """The span's parameters, in float32. The values are PyTorch's own; `initialisation.build` gives ours.

    With tied weights the head multiplies by `embedding.weight`: the parameter itself where the span has both ends,
    the span's own copy where it has the head alone (whose gradient must then be summed with that of stage 0).
    """

    table: Tensor | None

    def __init__(self, model: ModelConfig, span: StageSpan) -> None:
        super().__init__()
        self.model, self.span = model, span
        self.register_buffer("table", rotary_table(model) if model.positions == "rotary" else None, persistent=False)
        if span.has_embedding:
            self.embedding = nn.Embedding(model.vocabulary, model.hidden)
            if model.positions == "learned":
                self.positions = nn.Embedding(model.max_sequence, model.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(model) for i in range(span.first_block, span.last_block)})
        if span.has_head:
            self.final_norm = norm(model)
            if not model.tied:
                self.head = Linear(model.hidden, model.vocabulary, bias=False)
            elif not span.has_embedding:
                self.embedding = nn.Embedding(model.vocabulary, model.hidden)

    def forward(self, x: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """One pass through the span.

        x: tokens (B, T) int64 where the span has the embedding, else hidden states (B, T, D) float32;
        T <= max_sequence. Returns logits (B, T, V) float32 where the span has the head, else hidden states.
        later: where the backward pass leaves the weight gradients of linear layers and head; None: in .grad.
        """
        hidden_BTD = self.hidden_states(x, later)
        return self.logits(hidden_BTD, later) if self.span.has_head else hidden_BTD

    def hidden_states(self, x: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """(B, T, D) float32, as they leave the span's last block. x as for `forward`."""
        x_BTD = self._embed(x) if self.span.has_embedding else x
        table_2T1K = None if self.table is None else self.table[:, : x.shape[1]]
        for block in self.blocks.values():
            x_BTD = block(x_BTD, table_2T1K, later)
        return x_BTD

    def logits(self, hidden_BTD: Tensor, later: DeferredGradients | None = None) -> Tensor:
        """(B, T, V) float32; needs the head. Apart from `hidden_states` so that a sampler can ask for one token's."""
        weight_VD = self.embedding.weight if self.model.tied else self.head.weight
        return linear(self.final_norm(hidden_BTD), weight_VD, None, later)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.model.positions == "learned":
            x_BTD = x_BTD + self.positions.weight[: tokens_BT.shape[1]]
        return x_BTD
