"""Start every kernel of the package with a launcher: those of codecs and optimizer, and those of the model both ways.

Values begin `shift` values behind a multiple of 16 bytes: where a lane may take four at once, and where it may not.
"""

from __future__ import annotations

import math

import torch

from hpcllm.codecs import Codec
from hpcllm.codecs.gpu.launch import Launcher
from hpcllm.config.schema import OptimizerConfig
from hpcllm.model.gpu import fused
from hpcllm.model.loss import IGNORED
from hpcllm.optim.gpu import fused_adamw
from hpcllm.optim.gpu.fused_adamw import Numbers, Operands

HEADS = [(128, 128), (80, 20), (6, 2)]  # channels of a head, and how many of them are rotated


def start_codec(codec: Codec, n: int, shift: int = 0) -> None:
    """Encode, decode, add and, where the codec can, sum n values from 1e-30 to 1e30."""
    values = place((n,), codec.dtype, shift)
    values.copy_(torch.randn(n) * torch.logspace(-30, 30, n))
    data = codec.encode(values, torch.empty(codec.encoded_bytes(n), dtype=torch.uint8))
    for dtype in {codec.dtype, torch.float32}:
        codec.decode(data, place((n,), dtype, shift))
    codec.decode_add(data, place((n,), torch.float32, shift))
    if hasattr(codec, "sum_encode"):
        rows = torch.empty(3, len(data) + 3 & ~3, dtype=torch.uint8)
        rows[:, : len(data)] = data
        codec.sum_encode(rows, 1, values, torch.empty_like(data))


def start_update(launcher: Launcher, dtype: torch.dtype, n: int, shift: int = 0) -> None:
    """Update n weights of a type and their masters; the second half of them is not decayed."""
    weights, gradients, exp_avg, exp_avg_sq = (place((n,), torch.float32, shift) for _ in range(4))
    operands = Operands(weights, gradients, exp_avg, exp_avg_sq.abs_(), (n // 2,))
    fused_adamw.update(launcher, operands, Numbers(1, 1e-3, 2.0, OptimizerConfig()), place((n,), dtype, shift))


def start_model(dtype: torch.dtype, rows: int, width: int, shift: int = 0) -> None:
    """Start the kernels of rows of values, forward and backward. Needs `emulated.on_the_cpu`.

    Those of the norms are others for rows of more than 2048 values.
    """
    x, branch, weight = (
        place(shape, dtype, shift).requires_grad_() for shape in ((rows, width), (rows, width), (width,))
    )
    _both_ways([fused.swiglu(x, branch)], shift)
    _both_ways([fused.rms_norm(x, weight, 1e-5)], shift)
    _both_ways([*fused.added_rms_norm(x, branch, weight, 1e-5)], shift)
    logits, targets = x.detach(), torch.randint(width, (rows,))
    targets[0] = IGNORED
    normaliser, _ = fused.row_statistics(logits, targets, 0)
    fused.subtract_one_hot(logits, targets, 0, normaliser, torch.ones(rows))


def start_rotary(dtype: torch.dtype, tokens: int, channels: int, rotated: int, shift: int = 0) -> None:
    """Rotate 3 heads of queries and 2 of keys, by their place in the row and by places of their own, and back."""
    q, k = (place((1, tokens, heads, channels), dtype, shift).requires_grad_() for heads in (3, 2))
    table = torch.randn(2, tokens, 1, rotated)
    for positions in (None, torch.randint(tokens, (1, tokens))):
        _both_ways([*fused.rotate(q, k, table, positions)], shift)


def place(shape: tuple[int, ...], dtype: torch.dtype, shift: int) -> torch.Tensor:
    """Return random numbers."""
    memory = torch.randn(math.prod(shape) + shift).to(dtype)
    return memory[shift:].view(shape)


def _both_ways(results: list[torch.Tensor], shift: int) -> None:
    upstream = [place(tuple(result.shape), result.dtype, shift) for result in results]
    torch.autograd.backward(results, upstream)
