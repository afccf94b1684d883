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

from hpcllm.config.schema import AdapterConfig, ModelConfig
from hpcllm.model.attention import Angles, Attention, angles_of, rotary_table
from hpcllm.model.documents import AttentionPlan, Documents, plan_attention, plan_window
from hpcllm.model.gpu import fused
from hpcllm.model.gradient_sums import GradientSums, lookup
from hpcllm.model.linear import PLAIN, DeferredGradients, Linear, PassOptions, Weights, columns, rows
from hpcllm.model.loss import cross_entropy, cross_entropy_in_pieces
from hpcllm.model.paged_cache import CachedPass
from hpcllm.model.quantised import QuantisedWeight
from hpcllm.model.recompute import Recompute, checkpoint_block
from hpcllm.model.shapes import BASE_BITS, ENDS, StageSpan, UnshardHooks, is_adapter
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, in_order, sum_with_gradient
from hpcllm.mpi.partition import chunk_range

NO_ADAPTERS = AdapterConfig()


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
    rms_epsilon = layer.eps or 0.0
    return Recompute(lambda x, weight: fused.rms_norm(x, weight, rms_epsilon), (x_BTD, layer.weight))


def added_and_normed(
    layer: nn.Module, x_BTD: Tensor, branch_BTD: Tensor, recompute: bool
) -> tuple[Tensor, Tensor | Recompute]:
    """Return x + branch, and `norm`'s layer applied to that: by one kernel where there is one that keeps both."""
    if isinstance(layer, nn.RMSNorm) and layer.eps and not recompute and fused.kernels(x_BTD, branch_BTD, layer.weight):
        return fused.added_rms_norm(x_BTD, branch_BTD, layer.weight, layer.eps)
    sum_BTD = x_BTD + branch_BTD
    return sum_BTD, normed(layer, sum_BTD)


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
            activated = Recompute(fused.swiglu, gate_up)
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
        angles: Angles | None,
        options: PassOptions = PLAIN,
        cache: CachedPass | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Apply the layer to x on the residual path; the other arguments are those of Attention.forward."""
        attention_BTD = self.attention(normed(self.attention_norm, x_BTD), angles, options, cache, plan)
        half_BTD: Tensor
        normed_BTD: Tensor | Recompute
        if self.parallel:
            half_BTD, normed_BTD = x_BTD + attention_BTD, normed(self.ffn_norm, x_BTD)
        else:
            half_BTD, normed_BTD = added_and_normed(self.ffn_norm, x_BTD, attention_BTD, options.recompute)
        ffn_BTD: Tensor = self.ffn(normed_BTD, options)
        return half_BTD + ffn_BTD


def run_block(
    block: nn.Module,
    x_BTD: Tensor,
    angles: Angles | None,
    options: PassOptions,
    cache: CachedPass | None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Apply a Block: the function that compiled.py compiles, once for all blocks."""
    y_BTD: Tensor = block(x_BTD, angles, options, cache, plan)
    return y_BTD


def embedding(rows: int, hidden: int) -> nn.Embedding:
    """Make a table without values. To draw PyTorch's, on the meta device, would load its compiler: seconds a rank."""
    return nn.Embedding(rows, hidden, _weight=torch.empty(rows, hidden))


class Decoder(nn.Module):
    """Blocks, embedding and head of one span. Values are set by `initialisation.build`.

    With tied weights the head multiplies by `embedding.weight`: the parameter itself where the span has both ends,
    the span's own copy where it has the head alone (whose gradient must then be summed with that of stage 0). With
    adapters all but these is frozen: it asks for no gradient.

    Attributes to set before a pass: `exact`, by which nothing between tensor-parallel ranks is coded; `recompute`
    (recompute.py); `loss_tokens`, of how many tokens logits exist at once in `nats`, 0: of all; `unshard_hooks`;
    `gradient_sums`, where weight gradients are added, None: to .grad; `run_block`, which compiled.py replaces.
    """

    table: Tensor | None

    def __init__(
        self, model: ModelConfig, span: StageSpan, tp: TensorParallel = ALONE, adapter: AdapterConfig = NO_ADAPTERS
    ) -> None:
        super().__init__()
        self.model, self.span, self.shared_by, self.exact = model, span, tp, False
        self.unshard_hooks = UnshardHooks()
        self.gradient_sums: GradientSums | None = None
        self.recompute = "none"
        self.loss_tokens = 0
        self.run_block = run_block
        self._window: tuple[object, AttentionPlan] | None = None  # the last shape that had a window
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
        if adapter.rank:
            self._adapt(adapter)

    def _adapt(self, adapter: AdapterConfig) -> None:
        """Give each layer that is a target its adapter; freeze the rest, linear layers of blocks as `base` says."""
        for name, layer in self.blocks.named_modules():
            if isinstance(layer, Linear):
                if name.rpartition(".")[2] in adapter.targets:
                    layer.add_adapter(adapter.rank, adapter.alpha)
                if adapter.base in BASE_BITS:
                    layer.quantise(BASE_BITS[adapter.base])
                elif adapter.base == "bf16":
                    layer.weight.data = layer.weight.data.bfloat16()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_adapter(name))

    @property
    def quantised(self) -> dict[str, QuantisedWeight]:
        """Weights that are frozen and of 8 or 4 bits, by the names of the parameters in whose place they are."""
        layers = {name: layer for name, layer in self.named_modules() if isinstance(layer, Linear)}
        return {f"{name}.weight": layer.quantised for name, layer in layers.items() if layer.quantised}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def tp(self) -> TensorParallel:
        return dataclasses.replace(self.shared_by, codec="raw") if self.exact else self.shared_by

    def forward(self, x: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
        """Run one pass through the span. Collective over tp.

        x: tokens (B, T) int64 where the span has the embedding, else hidden states (B, T, D) in the type of the
        weights; T <= max_sequence. Returns logits (B, T, V) where the span has the head, else hidden states.
        deferred: where the backward pass leaves the weight gradients of linear layers and head; None: in .grad.
        """
        hidden_BTD = self.hidden_states(x, deferred)
        return self.logits(hidden_BTD, deferred) if self.span.has_head else hidden_BTD

    def hidden_states(
        self,
        x: Tensor,
        deferred: DeferredGradients | None = None,
        cache: CachedPass | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return (B, T, D) as they leave the span's last block. x is that of `forward`. Collective over tp.

        documents: those that do not see each other, their positions beginning anew; None: a row is one. cache: x is one
        row of new tokens of several texts, any number of them; then tp may not split the sequence.
        """
        assert not (cache and (self.tp.sequence or documents)), "a cache knows where each token is, and has all of them"
        documents = cache.documents if cache else documents
        end = x.shape[1] * (1 if self.span.has_embedding else self.tp.parts)
        x_BTD = self._embed(x, documents) if self.span.has_embedding else x
        if self.span.has_embedding and torch.is_grad_enabled() and not x_BTD.requires_grad:
            x_BTD.requires_grad_()  # frozen; the graph of the adapters begins here
        angles, eager = None, self.run_block is run_block
        if self.table is not None:
            angles = angles_of(self.table, end, documents, eager, x_BTD)
        plan = None if cache else self._plan(documents, end, x_BTD)
        options = self._options(deferred)
        if not eager:  # what is traced makes gradients of its own
            options = dataclasses.replace(options, sums=None)
        for number, block in self.blocks.items():
            unit = f"blocks.{number}"
            x_BTD = self.unshard_hooks.before_unit(unit, x_BTD)
            if self.recompute == "full":
                x_BTD = checkpoint_block(lambda x, block=block: block(x, angles, options, cache, plan), x_BTD)  # type: ignore[misc]
            else:
                x_BTD = self.run_block(block, x_BTD, angles, options, cache, plan)
            x_BTD = self.unshard_hooks.after_unit(unit, x_BTD)
        return x_BTD

    def _plan(self, documents: Documents | None, tokens: int, x_BTD: Tensor) -> AttentionPlan | None:
        """Prepare attention for all blocks of a pass; that of a window alone for all passes of this shape."""
        window, eager = self.model.window, self.run_block is run_block
        if documents is not None:
            return plan_attention(documents, window, eager, x_BTD)
        if not 0 < window < tokens:
            return None
        shape = len(x_BTD), tokens, x_BTD.dtype, x_BTD.device, eager
        if self._window is None or self._window[0] != shape:
            self._window = shape, plan_window(len(x_BTD), tokens, window, eager, x_BTD)
        return self._window[1]

    def logits(self, hidden_BTD: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
        """Return (B, T, V) of this rank's part of the vocabulary, from `first_token` on. Needs the head. Collective
        over tp.

        Separate from `hidden_states` so that a sampler can ask for one token's.
        """
        return in_order(self._logits(hidden_BTD, deferred), self.tp)

    def nats(self, hidden_BTD: Tensor, targets_BT: Tensor, deferred: DeferredGradients | None = None) -> Tensor:
        """Return (B, T) float32, the cross entropy of each target over the whole vocabulary. Needs the head.

        The same bits on all ranks of tp. Collective over tp. With `loss_tokens` the head's weight gradient comes with
        the first half of a backward pass: a second one would have to make the logits a third time.
        """
        targets_BT = as_gathered(targets_BT, self.tp)
        if not self.loss_tokens:
            nats = cross_entropy(self._logits(hidden_BTD, deferred), targets_BT, self.tp, self.first_token)
        else:
            x_BTD = normed(self.final_norm, self.unshard_hooks.before_unit(ENDS, hidden_BTD)).value()
            nats = cross_entropy_in_pieces(
                x_BTD, self.head_weight, targets_BT, self.loss_tokens, self.tp, self.first_token, self.gradient_sums
            )
        return in_order(nats, self.tp)

    def _logits(self, hidden_BTD: Tensor, deferred: DeferredGradients | None) -> Tensor:
        """Logits of the tokens in the order in which they are gathered."""
        hidden_BTD = self.unshard_hooks.before_unit(ENDS, hidden_BTD)
        (logits,) = columns(normed(self.final_norm, hidden_BTD), [Weights(self.head_weight)], self._options(deferred))
        return logits

    def _options(self, deferred: DeferredGradients | None) -> PassOptions:
        return PassOptions(self.tp, deferred, self.recompute == "selective", self.gradient_sums)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.model.tied else self.head.weight

    def _embed(self, tokens_BT: Tensor, documents: Documents | None) -> Tensor:
        """Look up each token, and its position in its row or document. Collective over tp.

        Where tp splits the table, a rank brings zeros for the tokens of others, so the sum is exact.
        """
        tokens_BT = self.unshard_hooks.before_unit(ENDS, tokens_BT)
        weight_VD = self.embedding.weight
        if self.tp.size == 1:
            x_BTD = lookup(tokens_BT, weight_VD, self.gradient_sums)
        else:
            rows_BT = as_gathered(tokens_BT, self.tp) - self.first_token
            elsewhere_BT = (rows_BT < 0) | (rows_BT >= weight_VD.shape[0])
            part = lookup(rows_BT.masked_fill_(elsewhere_BT, 0), weight_VD, self.gradient_sums)
            x_BTD = sum_with_gradient(part.masked_fill_(elsewhere_BT.unsqueeze(-1), 0.0), self.tp)
        if self.model.positions == "learned":
            start = self.tp.rank * x_BTD.shape[1] if self.tp.sequence else 0
            end = start + x_BTD.shape[1]
            if documents is None:
                return x_BTD + self.positions.weight[start:end]
            x_BTD = x_BTD + functional.embedding(documents.positions_BT[:, start:end], self.positions.weight)
        return x_BTD
