"""What the backward pass makes again instead of finding it kept.

    none        everything that it reads is kept
    selective   what is cheap to make is not: norms, turned queries and keys, attention's core, activation functions.
                The layer that reads such a tensor keeps its recipe, and makes it again for its weight gradient.
    full        of a block only its input is kept; the block runs again

    block, selective     x -(norm)-> [q k v] -(turn, attention)-> [output] -> + -(norm)-> [gate up] -(silu x)-> [down]
    kept                 ^            ^ ^ ^                                   ^             ^   ^

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
class Recipe:
    """A tensor that is not there yet: make(*of). What gradients it has go to `of`, parameters among them."""

    make: Callable[..., Tensor]
    of: Sequence[Tensor | None]

    def made(self) -> Tensor:
        return self.make(*self.of)


def recipe_of(x: Tensor | Recipe) -> Recipe:
    return x if isinstance(x, Recipe) else Recipe(lambda same: same, (x,))


def again(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """run(x), of which only x is kept: it runs once more in the backward pass.

    run must do the same both times; gradients of the parameters that it reads are added to their .grad in there.
    """
    if not torch.is_grad_enabled():
        return run(x)
    y: Tensor = _Again.apply(x, run)  # type: ignore[no-untyped-call]
    return y


class _Again(torch.autograd.Function):
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
