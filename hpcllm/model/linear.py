"""Linear layers whose backward pass can come in two halves: the input gradient now, the weight gradients later.

    forward      x ---> x w^T + b ---> y
    backward     x gradient <-- g w -- g            at once: the stage before waits for it
                                       |
                       DeferredGradients: (w, b, x, g)
                                       |
    when asked   w.grad += g^T x,  b.grad += sum of g       fills what would be the pipeline's idle time

The caller passes the list in; without one a layer is PyTorch's own and costs what it costs there. Norms and embeddings
have no second half: little is gained by putting their sums off. Source: arXiv:2401.10241 section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True)
class _Deferred:
    weight: Tensor  # (outputs, inputs)
    bias: Tensor | None  # (outputs,)
    x: Tensor  # (tokens, inputs)
    gradient: Tensor  # (tokens, outputs)


@dataclass
class DeferredGradients:
    """The weight gradients that one backward pass has left to be added."""

    _entries: list[_Deferred] = field(default_factory=list)  # in the order of the backward pass

    def append(self, weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor) -> None:
        """Note one layer's; x (tokens, inputs) and gradient (tokens, outputs) must not change until `add`."""
        self._entries.append(_Deferred(weight, bias, x, gradient))

    @torch.no_grad()
    def add(self, added: Callable[[Tensor], None]) -> None:
        """Add everything noted to the parameters' .grad; each entry's memory is free once it is added.

        added: called with a parameter after something was added to its .grad.
        """
        self._entries.reverse()
        while self._entries:
            entry = self._entries.pop()
            _gradient(entry.weight).addmm_(entry.gradient.t(), entry.x)
            added(entry.weight)
            if entry.bias is not None:
                _gradient(entry.bias).add_(entry.gradient.sum(0))
                added(entry.bias)


class Linear(nn.Linear):
    """torch.nn.Linear, the weight gradients of which can be put off."""

    def forward(self, x: Tensor, later: DeferredGradients | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, later)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, later: DeferredGradients | None) -> Tensor:
    """x (..., inputs) -> (..., outputs). later: where the gradients of weight and bias are left; None: in .grad."""
    if later is None or not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    y: Tensor = _InputGradientOnly.apply(x, (weight, bias), later)  # type: ignore[no-untyped-call]
    return y


class _InputGradientOnly(torch.autograd.Function):
    """Weight and bias come in a tuple, which autograd does not look into: they are no part of its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: tuple[Tensor, Tensor | None], later: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.later = weights, later
        return functional.linear(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,), (weight, bias) = ctx.saved_tensors, ctx.weights
        flat = gradient.reshape(-1, weight.shape[0])
        # detached: else x would keep the graph that made it, and with it the input of the whole stage
        ctx.later.append(weight, bias, x.detach().reshape(-1, weight.shape[1]), flat)
        return (flat @ weight).view(x.shape), None, None


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
