# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""Rotary positions: channels turn by the position, so that a score depends on the distance of two tokens only.

    (a, b) -> (a cos - b sin, b cos + a sin)       a pair: channels i and i + R/2, as published Llama weights have it
    angle of pair i at position p = p / theta^(2i/R)

Source: arXiv:2104.09864. Of a head's K channels the first R = rope_fraction x K turn (a quarter in arXiv:2204.06745).
For sequences longer than the weights were trained with, angles are stretched: "linear" divides all of them by the
factor (arXiv:2306.15595); "llama3" divides those that turn slowly, leaves those that turn fast, and blends in between
(Llama 3.1, arXiv:2407.21783, and the code that was published with its weights).

Shapes: B batch, T sequence, H heads, K channels a head, R channels that turn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcllm.config import ModelConfig


def rotary_table(model: ModelConfig) -> Tensor:
    """(2, max_sequence, 1, R) float32: cosines, and sines with the sign that their channel needs.

    On the CPU, also while parameters are built on the meta device. Angles are float64 until their cosine is taken:
    in float32 an angle of 8191 radians is off by up to 2^-12.
    """
    positions = torch.arange(model.max_sequence, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies(model))
    cos_TR = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin_TR = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return torch.stack([cos_TR, sin_TR]).unsqueeze(2).float()


def frequencies(model: ModelConfig) -> Tensor:
    """(R/2,) float64: radians a position, of each pair of channels."""
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


def turn(x_BTHK: Tensor, table_2T1R: Tensor) -> Tensor:
    """Rotate each head of each token by the angles of its position, in float32; returns the type of x."""
    turned = table_2T1R.shape[-1]
    if turned < x_BTHK.shape[-1]:
        return torch.cat([turn(x_BTHK[..., :turned], table_2T1R), x_BTHK[..., turned:]], dim=-1)
    cos_T1R, sin_T1R = table_2T1R
    first, second = x_BTHK.chunk(2, dim=-1)
    turned_BTHR = torch.addcmul(x_BTHK * cos_T1R, torch.cat([second, first], dim=-1).to(cos_T1R.dtype), sin_T1R)
    return turned_BTHR.to(x_BTHK.dtype)
