# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""What stands around attention: the embedding, the norms and the feed-forward network.

    gelu      down(gelu(up(x)))            GPT-2's shape
    swiglu    down(silu(gate(x)) * up(x))  Llama's (arXiv:2002.05202)

Norms and activation functions are recipes: the linear layer behind them decides whether they are kept (recompute.py).

Shapes: B batch, T sequence, D hidden, V vocabulary (of this rank, where tp splits it).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config import ModelConfig
from hpcllm.model.linear import PLAIN, Linear, Pass, columns, rows
from hpcllm.model.recompute import Recipe
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, reduced


def norm(model: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the hidden channels."""
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(model.hidden, eps=model.norm_epsilon)


def normed(layer: nn.Module, x_BTD: Tensor) -> Recipe:
    """What `norm`'s layer makes of x."""
    if isinstance(layer, nn.LayerNorm):
        shape, epsilon = layer.normalized_shape, layer.eps
        return Recipe(
            lambda x, weight, bias: functional.layer_norm(x, shape, weight, bias, epsilon),
            (x_BTD, layer.weight, layer.bias),
        )
    assert isinstance(layer, nn.RMSNorm)
    return Recipe(
        lambda x, weight: functional.rms_norm(x, layer.normalized_shape, weight, layer.eps), (x_BTD, layer.weight)
    )


def embedded(tokens_BT: Tensor, weight_VD: Tensor, first: int, tp: TensorParallel) -> Tensor:
    """(B, T, D), or this rank's (B, T/tp, D): the row of each token, of a table that tp splits. Collective over tp.

    first: the token of row 0. A rank brings zeros for the tokens of others, so the sum is exact.
    """
    if tp.size == 1:
        return functional.embedding(tokens_BT, weight_VD)
    rows_BT = as_gathered(tokens_BT, tp) - first
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= weight_VD.shape[0])
    x = functional.embedding(rows_BT.masked_fill_(elsewhere_BT, 0), weight_VD)
    return reduced(x.masked_fill_(elsewhere_BT.unsqueeze(-1), 0.0), tp)


def feed_forward(model: ModelConfig, tp: TensorParallel = ALONE) -> FeedForward | GatedFeedForward:
    return GatedFeedForward(model, tp) if model.activation == "swiglu" else FeedForward(model, tp)


class FeedForward(nn.Module):
    def __init__(self, model: ModelConfig, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.approximate = "tanh" if model.activation == "gelu_tanh" else "none"
        self.up = Linear(model.hidden, model.ffn // tp.size, bias=model.biases == "all")
        self.down = Linear(model.ffn // tp.size, model.hidden, bias=model.biases == "all")

    def forward(self, x_BTD: Tensor | Recipe, how: Pass = PLAIN) -> Tensor:
        up = columns(x_BTD, [self.up.weights], how)
        return rows(Recipe(lambda up: functional.gelu(up, approximate=self.approximate), up), self.down.weights, how)


class GatedFeedForward(nn.Module):
    def __init__(self, model: ModelConfig, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        ffn = model.ffn // tp.size
        self.gate = Linear(model.hidden, ffn, bias=model.biases == "all")
        self.up = Linear(model.hidden, ffn, bias=model.biases == "all")
        self.down = Linear(ffn, model.hidden, bias=model.biases == "all")

    def forward(self, x_BTD: Tensor | Recipe, how: Pass = PLAIN) -> Tensor:
        gate_up = columns(x_BTD, [self.gate.weights, self.up.weights], how)
        return rows(Recipe(lambda gate, up: functional.silu(gate) * up, gate_up), self.down.weights, how)
