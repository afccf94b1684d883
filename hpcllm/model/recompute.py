"""Recomputation: tensors that the backward pass makes again instead of finding them kept.

    none        everything that it reads is kept
    selective   what is cheap to make is not: norms, rotated queries and keys, attention's core, activation functions.
                The layer that reads such a tensor keeps how it is made, and makes it again for its weight gradient.
    full        of a block only its input is kept; the block runs again

    block, selective     x -(norm)-> [q k v] -(rotary, attention)-> [output] -> + -(norm)-> [gate up] -(silu x)-> [down]
    kept                 ^            ^ ^ ^                                     ^             ^   ^

Selective repeats no product with a weight and no message. Source: arXiv:2205.05198 section 5, which repeats attention's
core; with fused attention, whose scores are never kept, the rest is what is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Recompute:
    """A tensor that is not there yet: function(*inputs). Its gradients go to the inputs, parameters among them."""

    function: Callable[..., Tensor]
    inputs: Sequence[Tensor | None]

    def value(self) -> Tensor:
        return self.function(*self.inputs)


def checkpoint_block(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return run(x) and keep only x of it: it runs once more in the backward pass.

    run must do the same both times; gradients of the parameters that it reads are added to their .grad in there.
    """
    if not torch.is_grad_enabled():
        return run(x)
    y: Tensor = _Checkpoint.apply(x, run)  # type: ignore[no-untyped-call]
    return y


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None
