# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""Causal self-attention with grouped queries, and rotary positions.

    x --+-- query --(turn)--+
        +-- key ----(turn)--+-- softmax(q k^T / sqrt(K) + causal mask) v -- output -->
        +-- value ----------+

Rotary positions turn each pair (channel i, channel i + K/2) of a head by the angle
position / theta^(2i/K), so that a score depends on the distance of two tokens only (arXiv:2104.09864; pairs half a
head apart, as the published Llama weights have them):

    (a, b) -> (a cos - b sin, b cos + a sin)

Shapes: B batch, T sequence, D hidden, H query heads, G key and value heads (H a multiple of G), K channels a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config import ModelConfig
from hpcllm.model.linear import DeferredGradients, Linear


def rotary_table(model: ModelConfig) -> Tensor:
    """(2, max_sequence, 1, K) float32: cosines, and sines with the sign that their channel needs.

    On the CPU, also while parameters are built on the meta device. Angles are float64 until their cosine is taken:
    in float32 an angle of 8191 radians is off by up to 2^-12.
    """
    channels = torch.arange(0, model.head_dim, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(model.max_sequence, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, model.rope_theta ** (-channels / model.head_dim))
    cos_TK = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin_TK = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return torch.stack([cos_TK, sin_TK]).unsqueeze(2).float()


def turn(x_BTHK: Tensor, table_2T1K: Tensor) -> Tensor:
    """Rotate each head of each token by the angles of its position."""
    cos_T1K, sin_T1K = table_2T1K
    first, second = x_BTHK.chunk(2, dim=-1)
    return torch.addcmul(x_BTHK * cos_T1K, torch.cat([second, first], dim=-1), sin_T1K)


class Attention(nn.Module):
    """Query, key, value and output as four linear layers under the names of `shapes`.

    One product over joined query, key and value weights is 3 % faster than three (hidden 192, one core): too little
    for a weight layout that grouped queries complicate and a tensor-parallel split would have to take apart.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.grouped = model.key_value_heads != model.heads
        key_value = model.key_value_heads * model.head_dim
        self.query = Linear(model.hidden, model.hidden, bias=model.biases)
        self.key = Linear(model.hidden, key_value, bias=model.biases)
        self.value = Linear(model.hidden, key_value, bias=model.biases)
        self.output = Linear(model.hidden, model.hidden, bias=model.biases)

    def forward(self, x_BTD: Tensor, table_2T1K: Tensor | None, later: DeferredGradients | None = None) -> Tensor:
        """table_2T1K: the rows of `rotary_table` for these positions; None: positions were added to x before.

        later: where the linear layers leave their weight gradients; None: in .grad.
        """
        heads = (-1, self.head_dim)
        q_BTHK = self.query(x_BTD, later).unflatten(-1, heads)
        k_BTGK = self.key(x_BTD, later).unflatten(-1, heads)
        v_BTGK = self.value(x_BTD, later).unflatten(-1, heads)
        if table_2T1K is not None:
            q_BTHK, k_BTGK = turn(q_BTHK, table_2T1K), turn(k_BTGK, table_2T1K)
        out_BHTK = functional.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.grouped,
        )
        out_BTD: Tensor = self.output(out_BHTK.transpose(1, 2).flatten(2), later)
        return out_BTD
