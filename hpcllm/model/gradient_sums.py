"""Gradients of weights, added where their sum lies, in float32, without a tensor in between.

    linear layer    sum  = g^T x           first of a step        sum += g^T x             later: one kernel each
    its bias        sum  = rows of g                              sum += rows of g
    lookup          sum  = 0, then as later                       sum[token] += g[token]   other rows are not touched

The sum is read and written once: that no first gradient meets a sum made zero before saves a pass, that none is a
tensor of its own saves the rest. Bytes moved for a value of the sum, besides what the product reads:

                    first     later      through a gradient as autograd makes it, and added by a hook
    fp32            4         8          12 and 16, in two launches
    16 bit          4         8           8 and 12, in two, each microbatch's gradient rounded to 16 bits

Products of 16-bit values that add to a float32 sum are CUDA's, and ROCm's, in newer versions of PyTorch; elsewhere
(CPUs) such a gradient is still rounded to its type and then added.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class GradientSums(Protocol):
    """Memory of the sums of a step's gradients (optim/buckets.py)."""

    def total(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return the sum of a parameter's gradients, float32 and of its shape, and True if it has some of this step.

        Without one its memory holds anything. Who adds a gradient to it calls `added` next.
        """

    def added(self, parameter: Tensor) -> None:
        """Take note that a gradient was added to the parameter's total, or to its .grad."""


def add_product(total: Tensor, left: Tensor, right: Tensor, begun: bool) -> None:
    """Add left right to total, in place, or overwrite it if nothing has `begun`; 16-bit products to a float32 total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=int(begun))
    elif has_wide_products(left.device.type, left.dtype):
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=int(begun), out=total)
    elif begun:
        total.add_(left @ right)
    else:
        total.copy_(left @ right)


@cache
def has_wide_products(device: str, dtype: torch.dtype) -> bool:
    """Return True if PyTorch adds products of a 16-bit type to float32 by one kernel on a type of device.

    It tries once, and the host waits for the result: before a first step is the time to ask.
    """
    x, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, x, x, out_dtype=torch.float32, out=total)
        return torch.equal(total, torch.full_like(total, 17.0))
    except (RuntimeError, TypeError):  # no such kernel; a PyTorch without the argument
        return False


def add_layer(sums: GradientSums, weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor) -> None:
    """Add what a linear layer's weight and bias get: x (tokens, inputs), gradient (tokens, outputs)."""
    total, begun = sums.total(weight)
    add_product(total, gradient.t(), x, begun)
    sums.added(weight)
    if bias is not None:
        total, begun = sums.total(bias)
        if begun:
            total.add_(gradient.sum(0, dtype=torch.float32))
        else:
            torch.sum(gradient, 0, dtype=torch.float32, out=total)
        sums.added(bias)


def lookup(tokens: Tensor, table: Tensor, sums: GradientSums | None) -> Tensor:
    """Return the rows (..., channels) of a table (rows, channels); tokens: (...) int64.

    The gradient of the table goes to its sum; without sums to its .grad, as PyTorch makes it. It may be frozen.
    """
    if sums is None or not table.requires_grad:
        return functional.embedding(tokens, table)
    anchor = table.new_empty(0, requires_grad=True)  # by which autograd comes here: the table itself would get a hook
    rows: Tensor = _Lookup.apply(anchor, tokens, (table, sums))  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, tokens: Tensor, table_and_sums: tuple[Tensor, GradientSums]) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table, ctx.sums = table_and_sums
        return functional.embedding(tokens, ctx.table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        total, begun = ctx.sums.total(ctx.table)
        if not begun:
            total.zero_()
        add_rows(total, tokens.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        ctx.sums.added(ctx.table)
        return None, None, None


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values (n, channels) to rows (n,) of total (rows, channels), in place; a row may come several times.

    Rows are known to be inside, so that on a device the host does not read them: see loss.py. There the rows are
    sorted, and the sum of each has one order.
    """
    values = values.to(total.dtype)
    if total.is_cpu:
        total.index_add_(0, rows, values)
    else:
        torch.ops.aten._index_put_impl_(total, [rows], values, True, True)  # accumulate, unsafe
