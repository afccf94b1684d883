# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""What stands between two attentions: the norms and the feed-forward network.

    gelu      down(gelu(up(x)))            GPT-2's shape
    swiglu    down(silu(gate(x)) * up(x))  Llama's (arXiv:2002.05202)

`later` is where the linear layers leave their weight gradients, if not None: see linear.py.

Shapes: B batch, T sequence, D hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config import ModelConfig
from hpcllm.model.linear import DeferredGradients, Linear


def norm(model: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the hidden channels."""
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(model.hidden, eps=model.norm_epsilon)


def feed_forward(model: ModelConfig) -> nn.Module:
    return GatedFeedForward(model) if model.activation == "swiglu" else FeedForward(model)


class FeedForward(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if model.activation == "gelu_tanh" else "none"
        self.up = Linear(model.hidden, model.ffn, bias=model.biases == "all")
        self.down = Linear(model.ffn, model.hidden, bias=model.biases == "all")

    def forward(self, x_BTD: Tensor, later: DeferredGradients | None = None) -> Tensor:
        y_BTD: Tensor = self.down(functional.gelu(self.up(x_BTD, later), approximate=self.approximate), later)
        return y_BTD


class GatedFeedForward(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(model.hidden, model.ffn, bias=model.biases == "all")
        self.up = Linear(model.hidden, model.ffn, bias=model.biases == "all")
        self.down = Linear(model.ffn, model.hidden, bias=model.biases == "all")

    def forward(self, x_BTD: Tensor, later: DeferredGradients | None = None) -> Tensor:
        y_BTD: Tensor = self.down(functional.silu(self.gate(x_BTD, later)) * self.up(x_BTD, later), later)
        return y_BTD
