# ruff: noqa: N803, N806, N815 - shape suffixes are upper case; the legend is in the text below
"""Causal self-attention with grouped queries, rotary positions and a sliding window if the model has one.

    x --+-- query --(rotary)--+
        +-- key ----(rotary)--+-- softmax(q k^T / sqrt(K) + mask) v -- output -->
        +-- value ------------+
                             mask, window 3:   x . . . .      a token sees itself and those before it,
                                               x x . . .      at most `window` in all
                                               x x x . .
                                               . x x x .

Rotary positions (arXiv:2104.09864) rotate channels by the position, so that a score depends on the distance of two
tokens only. Of a head's K channels the first R = rope_fraction x K are rotated (a quarter in arXiv:2204.06745).

    (a, b) -> (a cos - b sin, b cos + a sin)       a pair: channels i and i + R/2, as published Llama weights have it
    angle of pair i at position p = p / theta^(2i/R)

For sequences longer than the weights were trained with, angles are stretched: "linear" divides all of them by the
factor (arXiv:2306.15595); "llama3" divides those that change slowly, leaves those that change fast, and blends in
between (Llama 3.1, arXiv:2407.21783, and the code that was published with its weights).

Shapes: B batch, T sequence, D hidden, H query heads, G key and value heads (H a multiple of G), K channels a head,
R channels of a head that are rotated, S tokens that are looked at: T, or more if they are given. Heads are those of
this rank, where tp splits them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcllm.config.schema import ModelConfig
from hpcllm.model import eager
from hpcllm.model.documents import AttentionPlan, Documents
from hpcllm.model.gpu import fused
from hpcllm.model.linear import PLAIN, Linear, PassOptions, columns, rows
from hpcllm.model.paged_cache import CachedPass
from hpcllm.model.recompute import Recompute
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, as_gathered, in_order


class Attention(nn.Module):
    """Query, key, value and output as four linear layers under the names in shapes.py.

    One product over joined query, key and value weights is 3 % faster than three (hidden 192, one core): too little
    for a weight layout that grouped queries complicate and a tensor-parallel split would have to take apart.
    """

    def __init__(self, model: ModelConfig, number: int, tp: TensorParallel = ALONE) -> None:
        """number: index of the block, by which a cache knows it."""
        super().__init__()
        self.number, self.window, self.head_dim = number, model.window, model.head_dim
        queries = model.heads // tp.size * model.head_dim
        key_values = model.key_value_heads // tp.size * model.head_dim
        biases = model.biases != "none"
        self.query = Linear(model.hidden, queries, bias=biases)
        self.key = Linear(model.hidden, key_values, bias=biases)
        self.value = Linear(model.hidden, key_values, bias=biases)
        self.output = Linear(queries, model.hidden, bias=model.biases == "all")

    def forward(
        self,
        x_BTD: Tensor | Recompute,
        angles: Angles | None,
        options: PassOptions = PLAIN,
        cache: CachedPass | None = None,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Attend. angles: of these positions; None: positions were added to x before.

        cache: x is new tokens of several texts, whose keys and values are kept; None: nothing is. plan: how attention
        stays inside the documents of x; None: a row is one. Collective over tp; where that splits the sequence, x and
        the result are this rank's part, (B, T/tp, D).
        """

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """Compute all between the linear layers, from their outputs to the input of `output`."""
            ordered = (in_order(x, options.tp) for x in (query, key, value))
            q_BTHK, k_BTGK, v_BTGK = (x.view(*x.shape[:2], -1, self.head_dim) for x in ordered)
            if angles is not None:
                q_BTHK, k_BTGK = rotated_pair(q_BTHK, k_BTGK, angles)
            if cache is not None:
                out_BTHK = cache.attend(self.number, causal_attention, q_BTHK, k_BTGK, v_BTGK)
            elif plan is None:
                out_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK, self.window)
            else:
                out_BTHK = plan.attend(causal_attention, q_BTHK, k_BTGK, v_BTGK, self.window)
            return as_gathered(out_BTHK, options.tp).flatten(-2)

        q_k_v = columns(x_BTD, (self.query.weights, self.key.weights, self.value.weights), options)
        return rows(Recompute(core, q_k_v), self.output.weights, options)


def causal_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int, mask_B1TS: Tensor | None = None
) -> Tensor:
    """Attend from the last T of S tokens to those before them, `window` at most, 0: all; returns (B, T, H, K).

    mask_B1TS: in place of the triangle: bool, true where a token looks, or what is added to scores. No kernel of a
    device takes both a mask and grouped queries, and without one (B, H, T, S) scores would be kept: so keys and values
    are then repeated for each query head.
    """
    mask = _mask(q_BTHK.shape[1], k_BSGK.shape[1], window, q_BTHK.device) if mask_B1TS is None else mask_B1TS
    if mask is not None and not q_BTHK.is_cpu:
        k_BSGK, v_BSGK = (_repeated(x, q_BTHK.shape[2]) for x in (k_BSGK, v_BSGK))
    out_BHTK = functional.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and q_BTHK.shape[1] > 1,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return out_BHTK.transpose(1, 2)


def _repeated(x_BSGK: Tensor, heads: int) -> Tensor:
    """Return (B, S, H, K): each of G heads, H / G times side by side."""
    groups = x_BSGK.shape[2]
    return x_BSGK if groups == heads else x_BSGK.repeat_interleave(heads // groups, dim=2)


def _mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor | None:
    """Return (T, S) bool: true where the last T of S tokens look; None where plain causal attention says it all.

    Flash kernels take no mask, so it is made only where there is no other way.
    """
    whole = queries in (1, keys)  # one new token looks at everything; as many as keys: the usual triangle
    if whole and not 0 < window < keys:
        return None
    seen = torch.arange(keys, device=device)
    distance = seen[keys - queries :].unsqueeze(1) - seen
    return (distance >= 0) & (distance < (window or keys))


def rotary_table(model: ModelConfig) -> Tensor:
    """Return (2, max_sequence, 1, R) float32: cosines, and sines with the sign that their channel needs.

    On the CPU, also while parameters are built on the meta device. Angles are float64 until their cosine is taken:
    in float32 an angle of 8191 radians is off by up to 2^-12.
    """
    positions = torch.arange(model.max_sequence, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies(model))
    cos_TR = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin_TR = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return torch.stack([cos_TR, sin_TR]).unsqueeze(2).float()


def frequencies(model: ModelConfig) -> Tensor:
    """Return (R/2,) float64: radians a position, of each pair of channels."""
    channels = torch.arange(0, model.turned_channels, 2, dtype=torch.float64, device="cpu")
    plain = model.rope_theta ** (-channels / model.turned_channels)
    if model.rope_scaling == "none":
        return plain
    stretched = plain / model.rope_factor
    if model.rope_scaling == "linear":
        return stretched
    turns = model.rope_original_sequence * plain / (2 * math.pi)
    low, high = model.rope_low_frequency, model.rope_high_frequency
    return torch.lerp(stretched, plain, ((turns - low) / (high - low)).clamp(0, 1))


class Angles(NamedTuple):
    """Angles by which a pass rotates its tokens, for all layers."""

    table_2S1R: Tensor  # rows of `rotary_table`: of T positions in order, or all of them
    positions_BT: Tensor | None = None  # int64, of each token, where a kernel looks its row up; None: in order
    # where there is no kernel, documents' angles are looked up once for all layers: the table is (2, B, T, 1, R)


def angles_of(table_2S1R: Tensor, end: int, documents: Documents | None, eager: bool, like: Tensor) -> Angles:
    """Return the angles of positions [0, end), or of each token in its document.

    eager: blocks are not compiled. like: of the type and device of queries and keys.
    """
    if documents is None:
        return Angles(table_2S1R[:, :end])
    if eager and fused.kernels(like):
        return Angles(table_2S1R, documents.positions_BT)
    return Angles(table_2S1R[:, documents.positions_BT])


def rotated_pair(q_BTHK: Tensor, k_BTGK: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: by one kernel where there is one."""
    table, positions_BT = angles
    if table.dim() == 4 and fused.kernels(q_BTHK, k_BTGK):
        return fused.rotate(q_BTHK, k_BTGK, table, positions_BT)
    if torch.compiler.is_compiling():
        return apply_rotary(q_BTHK, table), apply_rotary(k_BTGK, table)
    return eager.rotate(q_BTHK, table), eager.rotate(k_BTGK, table)


def apply_rotary(x_BTHK: Tensor, table_2T1R: Tensor) -> Tensor:
    """Rotate each head of each token by the angles of its position, in float32, as torch.compile is to see it.

    Returns the type of x. Truth for what others do by hand or in one kernel.
    """
    rotated = table_2T1R.shape[-1]
    if rotated < x_BTHK.shape[-1]:
        return torch.cat([apply_rotary(x_BTHK[..., :rotated], table_2T1R), x_BTHK[..., rotated:]], dim=-1)
    cos_T1R, sin_T1R = table_2T1R
    first, second = x_BTHK.chunk(2, dim=-1)
    rotated_BTHR = torch.addcmul(x_BTHK * cos_T1R, torch.cat([second, first], dim=-1).to(cos_T1R.dtype), sin_T1R)
    return rotated_BTHR.to(x_BTHK.dtype)
