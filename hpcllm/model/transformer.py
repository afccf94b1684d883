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
         ffn, GPT-2's:  down(gelu(up(x)));  Llama's (swiglu, arXiv:2002.05202):  down(silu(gate(x)) * up(x))
                                   |
       +---------------------------+----------------------------+
       |                                                        |
    final norm, head -> logits, loss              hidden states to the stage behind

`shapes.parameter_shapes` is the table of its parameters: `named_parameters()` gives the same names and shapes in the
same order, whichever span is held; where tp splits a parameter, its shape is that of this rank's shard (shapes.py).
Norms and activation functions are handed on as a Recompute: the linear layer behind them decides whether they are kept.

Shapes: B batch, T sequence, D hidden, V vocabulary (of this rank, where tp splits it), R channels of a head that are
rotated (attention.py). Where tp splits the sequence, hidden states are (B, T/tp, D).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config.schema import ModelConfig
from hpcllm.model.attention import Attention, KeyValueCache, rotary_table
from hpcllm.model.linear import PLAIN, DeferredGradients, Linear, PassOptions, columns, rows
from hpcllm.model.loss import cross_entropy_sum, cross_entropy_sum_in_pieces
from hpcllm.model.recompute import Recompute, checkpoint_block
from hpcllm.model.shapes import ENDS, StageSpan, UnshardHooks
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, in_order, sum_with_gradient
from hpcllm.mpi.partition import chunk_range


def norm(model: ModelConfig) -> nn.Module:
    """Make the LayerNorm or RMSNorm over the hidden channels."""
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(model.hidden, eps=model.norm_epsilon)


def normed(layer: nn.Module, x_BTD: Tensor) -> Recompute:
    """Apply `norm`'s layer to x."""
    if isinstance(layer, nn.LayerNorm):
        shape, epsilon = layer.normalized_shape, layer.eps
        return Recompute(
            lambda x, weight, bias: functional.layer_norm(x, shape, weight, bias, epsilon),
            (x_BTD, layer.weight, layer.bias),
        )
    assert isinstance(layer, nn.RMSNorm)
    return Recompute(
        lambda x, weight: functional.rms_norm(x, layer.normalized_shape, weight, layer.eps), (x_BTD, layer.weight)
    )


class FeedForward(nn.Module):
    """Two linear layers with an activation function between them, or three where a gate multiplies it."""

    def __init__(self, model: ModelConfig, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        ffn, bias = model.ffn // tp.size, model.biases == "all"
        self.gate = Linear(model.hidden, ffn, bias=bias) if model.activation == "swiglu" else None
        self.up = Linear(model.hidden, ffn, bias=bias)
        self.down = Linear(ffn, model.hidden, bias=bias)
        self.approximate = "tanh" if model.activation == "gelu_tanh" else "none"

    def forward(self, x_BTD: Tensor | Recompute, options: PassOptions = PLAIN) -> Tensor:
        if self.gate is not None:
            gate_up = columns(x_BTD, [self.gate.weights, self.up.weights], options)
            activated = Recompute(lambda gate, up: functional.silu(gate) * up, gate_up)
        else:
            up = columns(x_BTD, [self.up.weights], options)
            activated = Recompute(lambda up: functional.gelu(up, approximate=self.approximate), up)
        return rows(activated, self.down.weights, options)


class Block(nn.Module):
    """One layer, normalised before each half so that the residual path is a plain sum."""

    def __init__(self, model: ModelConfig, number: int, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.parallel = model.parallel_residual
        self.attention_norm = norm(model)
        self.attention = Attention(model, number, tp)
        self.ffn_norm = norm(model)
        self.ffn = FeedForward(model, tp)

    def forward(
        self,
        x_BTD: Tensor,
        table_2T1R: Tensor | None,
        options: PassOptions = PLAIN,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Apply the layer to x on the residual path; the other arguments are those of Attention.forward."""
        half_BTD: Tensor = x_BTD + self.attention(normed(self.attention_norm, x_BTD), table_2T1R, options, cache)
        ffn_BTD: Tensor = self.ffn(normed(self.ffn_norm, x_BTD if self.parallel else half_BTD), options)
        return half_BTD + ffn_BTD


def run_block(
    block: nn.Module, x_BTD: Tensor, table_2T1R: Tensor | None, options: PassOptions, cache: KeyValueCache | None
) -> Tensor:
    """Apply a Block: the function that compiled.py compiles, once for all blocks."""
    y_BTD: Tensor = block(x_BTD, table_2T1R, options, cache)
    return y_BTD


def embedding(rows: int, hidden: int) -> nn.Embedding:
    """Make a table without values. To draw PyTorch's, on the meta device, would load its compiler: seconds a rank."""
    return nn.Embedding(rows, hidden, _weight=torch.empty(rows, hidden))


class Decoder(nn.Module):
    """Blocks, embedding and head of one span. Values are set by `initialisation.build`.

    With tied weights the head multiplies by `embedding.weight`: the parameter itself where the span has both ends,
    the span's own copy where it has the head alone (whose gradient must then be summed with that of stage 0).

    Attributes to set before a pass: `exact`, by which nothing between tensor-parallel ranks is coded; `recompute`
    (recompute.py); `loss_tokens`, of how many tokens logits exist at once in `loss_sum`, 0: of all; `unshard_hooks`;
    `run_block`, which compiled.py replaces.
    """

    table: Tensor | None

    def __init__(self, model: ModelConfig, span: StageSpan, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.model, self.span, self.shared_by, self.exact = model, span, tp, False
        self.unshard_hooks = UnshardHooks()
        self.recompute = "none"
        self.loss_tokens = 0
        self.run_block = run_block
        self.first_token, end = chunk_range(model.vocabulary, tp.size, tp.rank)  # of this rank's rows of the tables
        vocabulary = end - self.first_token
        self.register_buffer("table", rotary_table(model) if model.positions == "rotary" else None, persistent=False)
        if span.has_embedding:
            self.embedding = embedding(vocabulary, model.hidden)
            if model.positions == "learned":
                self.positions = embedding(model.max_sequence, model.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(model, i, tp) for i in range(span.first_block, span.last_block)})
        if span.has_head:
            self.final_norm = norm(model)
            if not model.tied:
                self.head = Linear(model.hidden, vocabulary, bias=False)
            elif not span.has_embedding:
                self.embedding = embedding(vocabulary, model.hidden)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def tp(self) -> TensorParallel:
        return dataclasses.replace(self.shared_by, codec="raw") if self.exact else self.shared_by

    def forward(
        self, x: Tensor, deferred: DeferredGradients | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Run one pass through the span. Collective over tp.

        x: tokens (B, T) int64 where the span has the embedding, else hidden states (B, T, D) in the type of the
        weights; T <= max_sequence. Returns logits (B, T, V) where the span has the head, else hidden states.
        deferred: where the backward pass leaves the weight gradients of linear layers and head; None: in .grad.
        cache: of the tokens before x, which takes in those of x; then B, and T <= max_sequence, count both, and tp
        may not split the sequence.
        """
        hidden_BTD = self.hidden_states(x, deferred, cache)
        return self.logits(hidden_BTD, deferred) if self.span.has_head else hidden_BTD

    def hidden_states(
        self, x: Tensor, deferred: DeferredGradients | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return (B, T, D) as they leave the span's last block. x is that of `forward`. Collective over tp."""
        assert not (cache and self.tp.sequence), "new tokens are not split over ranks"
        start = cache.length if cache else 0
        end = start + x.shape[1] * (1 if self.span.has_embedding else self.tp.parts)
        x_BTD = self._embed(x, start) if self.span.has_embedding else x
        table_2T1R = None if self.table is None else self.table[:, start:end]
        options = self._options(deferred)
        for number, block in self.blocks.items():
            unit = f"blocks.{number}"
            x_BTD = self.unshard_hooks.before_unit(unit, x_BTD)
            if self.recompute == "full":
                x_BTD = checkpoint_block(lambda x, block=block: block(x, table_2T1R, options, cache), x_BTD)  # type: ignore[misc]
            else:
                x_BTD = self.run_block(block, x_BTD, table_2T1R, options, cache)
            x_BTD = self.unshard_hooks.after_unit(unit, x_BTD)
        if cache:
            cache.length = end
        return x_BTD

    def logits(self, hidden_BTD: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
        """Return (B, T, V) of this rank's part of the vocabulary, from `first_token` on. Needs the head. Collective
        over tp.

        Separate from `hidden_states` so that a sampler can ask for one token's.
        """
        return in_order(self._logits(hidden_BTD, deferred), self.tp)

    def loss_sum(self, hidden_BTD: Tensor, targets_BT: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
        """Sum the cross entropy over the whole vocabulary (loss.cross_entropy_sum). Needs the head.

        The same bits on all ranks of tp. Collective over tp. With `loss_tokens` the head's weight gradient comes with
        the first half of a backward pass: a second one would have to make the logits a third time.
        """
        targets_BT = as_gathered(targets_BT, self.tp)
        if not self.loss_tokens:
            return cross_entropy_sum(self._logits(hidden_BTD, deferred), targets_BT, self.tp, self.first_token)
        x_BTD = normed(self.final_norm, self.unshard_hooks.before_unit(ENDS, hidden_BTD)).value()
        return cross_entropy_sum_in_pieces(x_BTD, self._head(), targets_BT, self.loss_tokens, self.tp, self.first_token)

    def _logits(self, hidden_BTD: Tensor, deferred: DeferredGradients | None) -> Tensor:
        """Logits of the tokens in the order in which they are gathered."""
        hidden_BTD = self.unshard_hooks.before_unit(ENDS, hidden_BTD)
        (logits,) = columns(normed(self.final_norm, hidden_BTD), [(self._head(), None)], self._options(deferred))
        return logits

    def _options(self, deferred: DeferredGradients | None) -> PassOptions:
        return PassOptions(self.tp, deferred, self.recompute == "selective")

    def _head(self) -> Tensor:
        return self.embedding.weight if self.model.tied else self.head.weight

    def _embed(self, tokens_BT: Tensor, start: int) -> Tensor:
        """Look up each token, and its position from `start` on. Collective over tp.

        Where tp splits the table, a rank brings zeros for the tokens of others, so the sum is exact.
        """
        tokens_BT = self.unshard_hooks.before_unit(ENDS, tokens_BT)
        weight_VD = self.embedding.weight
        if self.tp.size == 1:
            x_BTD = functional.embedding(tokens_BT, weight_VD)
        else:
            rows_BT = as_gathered(tokens_BT, self.tp) - self.first_token
            elsewhere_BT = (rows_BT < 0) | (rows_BT >= weight_VD.shape[0])
            part = functional.embedding(rows_BT.masked_fill_(elsewhere_BT, 0), weight_VD)
            x_BTD = sum_with_gradient(part.masked_fill_(elsewhere_BT.unsqueeze(-1), 0.0), self.tp)
        if self.model.positions == "learned":
            if self.tp.sequence:
                start += self.tp.rank * x_BTD.shape[1]
            x_BTD = x_BTD + self.positions.weight[start : start + x_BTD.shape[1]]
        return x_BTD
