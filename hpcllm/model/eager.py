"""RMSNorm and rotary positions by PyTorch's operations, few of them, with their gradients written out.

For where no kernel of gpu/fused.py is, CPUs above all. Passes over the values, forward and backward, beside those of
PyTorch's own operations with the gradients that autograd derives:

                forward                                  backward                                   passes
    RMSNorm     norm of a row; x scale; times weight     t = g x; t w; t^T scale; three for x       5 + 11, not 7 + 18
    rotary      four half passes, into the result        the same by the opposite angle             7 + 7, not 8 + 12

Kept for the gradient of a norm: its input, and a number a token. Computed in float32 whatever the values are. Not while
torch.compile traces: it fuses by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean of squares + epsilon) weight, over the last dim (arXiv:1910.07467)."""
    if not torch.is_grad_enabled():  # a text's next token has few values: what autograd notes would cost more
        return _normed(x, weight, epsilon)[0]
    y: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return y


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and the factor of each."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norms.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y, scale = _normed(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        gradient, wide, width = gradient.float(), weight.float(), x.shape[-1]
        products = (gradient * x).view(-1, width)
        along = (products @ wide).view(scale.shape).mul_(scale.pow(3)).div_(-width)  # what comes back of x itself
        of_weight = products.t() @ scale.flatten()
        del products
        of_x = (gradient * wide).mul_(scale).addcmul_(x.float(), along)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each head of each token by the angles of its position (attention.py); returns the type of x.

    x: (B, T, H, K); table: (2, T, 1, R) float32, or (2, B, T, 1, R), of which the first R/2 channels are read.
    """
    if not torch.is_grad_enabled():
        return _rotated(x, table, 1.0)
    rotated: Tensor = _Rotation.apply(x, table)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return _rotated(x, table, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _rotated(gradient, ctx.table, -1.0), None


def _rotated(x: Tensor, table: Tensor, sign: float) -> Tensor:
    """Rotate by the angles, or (sign -1) by the opposite ones."""
    half = table.shape[-1] // 2
    cosines, negative_sines = table[..., :half]
    a, b, others = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if others.shape[-1]:
        out[..., 2 * half :] = others
    for into, own, other, way in ((out[..., :half], a, b, sign), (out[..., half : 2 * half], b, a, -sign)):
        if x.dtype == table.dtype:
            torch.mul(own, cosines, out=into).addcmul_(other, negative_sines, value=way)
        else:
            into.copy_((own * cosines).addcmul_(other.to(table.dtype), negative_sines, value=way))
    return out
