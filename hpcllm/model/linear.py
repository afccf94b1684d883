"""Linear layers: alone or split over tensor-parallel ranks, with a backward pass that can come in two halves.

    columns   x --(joined)--> x w^T + b for each of several layers that read the same x, each rank some of the outputs
    rows      x w^T, each rank some of the inputs --(reduced)--> + b

    backward      g ---> sum of g w --(reduced)--> x gradient      at once: the stage before waits for it
                     \\                                              the messages travel while weight gradients
                      `-> g^T x, sum of g                           are made, now or when a schedule asks for them:
                          DeferredGradients: (w, b, x, g)           it fills what would be the pipeline's idle time

Layers that are alone, with nothing put off and nothing made again, are PyTorch's own and cost what they cost there.
Norms and embeddings have no second half: little is gained by putting their sums off. A layer may be handed a recipe in
place of x (recompute.py). Source of the halves: arXiv:2401.10241 section 2; of the split: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm.model.recompute import Recipe, recipe_of
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, joined, start_joining, start_summing, summed

Weights = tuple[Tensor, Tensor | None]  # (outputs, inputs) and (outputs,): weight and bias


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
            add_product(_gradient(entry.weight), entry.gradient.t(), entry.x)
            added(entry.weight)
            if entry.bias is not None:
                _gradient(entry.bias).add_(entry.gradient.sum(0))
                added(entry.bias)


@dataclass(frozen=True)
class Pass:
    """How one forward pass, and the backward pass that follows it, go through the layers."""

    tp: TensorParallel = ALONE
    later: DeferredGradients | None = None  # where linear layers leave their weight gradients; None: in .grad
    remake: bool = False  # a layer keeps the recipe of what it reads, where there is one


PLAIN = Pass()


class Linear(nn.Linear):
    """The parameters of a linear layer: of this rank's part, where tp splits it."""

    @property
    def weights(self) -> Weights:
        return self.weight, self.bias


def columns(x: Tensor | Recipe, layers: Sequence[Weights], how: Pass = PLAIN) -> tuple[Tensor, ...]:
    """What each layer makes of x (..., inputs): this rank's (..., outputs). Collective over tp.

    Where tp splits the sequence, x is (B, T/tp, inputs) and the results are (tp, B, T/tp, outputs). The gradient of x
    is whole. One exchange forward if the sequence is split, and one, or two, backward.
    """
    recipe = recipe_of(x)
    if how.remake:
        return _apply(_Columns, recipe, layers, how)
    made = recipe.made()
    if how.tp.size > 1:
        return _apply(_Columns, recipe_of(made), layers, how)
    if how.later is None:
        return tuple(functional.linear(made, *weights) for weights in layers)
    return tuple(y for weights in layers for y in _apply(_Columns, recipe_of(made), [weights], how))


def rows(x: Tensor | Recipe, layer: Weights, how: Pass = PLAIN) -> Tensor:
    """The sum over tp of what the layer makes of each rank's part x (..., inputs): (..., outputs). Collective over tp.

    Where tp splits the sequence, x is (tp, B, T/tp, inputs) and the result (B, T/tp, outputs). One exchange forward,
    and one backward if the sequence is split.
    """
    recipe = recipe_of(x)
    if how.tp.size == 1 and how.later is None and not how.remake:
        return functional.linear(recipe.made(), *layer)
    if not how.remake:
        recipe = recipe_of(recipe.made())
    (y,) = _apply(_Rows, recipe, [layer], how)
    return y


@dataclass(frozen=True)
class _Job:
    make: Callable[..., Tensor]
    ingredients: int  # of the tensors that follow; the others are weights and biases
    layers: Sequence[Weights]
    how: Pass


def _apply(
    function: type[torch.autograd.Function], recipe: Recipe, layers: Sequence[Weights], how: Pass
) -> tuple[Tensor, ...]:
    """Weights whose gradients come later stand in the job alone, where autograd does not see them."""
    job = _Job(recipe.make, len(recipe.of), layers, how)
    seen = () if how.later else [tensor for weights in layers for tensor in weights]
    made: tuple[Tensor, ...] = function.apply(job, *recipe.of, *seen)  # type: ignore[no-untyped-call]
    return made


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*tensors[: job.ingredients])
        whole = joined(job.make(*tensors[: job.ingredients]), job.how.tp)
        return tuple(functional.linear(whole, *weights) for weights in job.layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        job, tp = ctx.job, ctx.job.how.tp
        ingredients, x = _remade(ctx)
        whole = start_joining(x, tp)
        flat = [_flat(gradient) for gradient in gradients]
        total = flat[0] @ job.layers[0][0]
        for gradient, (weight, _) in zip(flat[1:], job.layers[1:], strict=True):
            total.addmm_(gradient, weight)
        mine = start_summing(total.view(*gradients[0].shape[:-1], -1), tp)
        of_weights = _weight_gradients(job, _flat(whole()), flat)
        return None, *_through(x, ingredients, mine().view(x.shape)), *of_weights


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor | None) -> tuple[Tensor]:
        ctx.job = job
        ctx.save_for_backward(*tensors[: job.ingredients])
        weight, bias = job.layers[0]
        x = job.make(*tensors[: job.ingredients])
        if job.how.tp.size == 1:
            return (functional.linear(x, weight, bias),)
        y = summed(functional.linear(x, weight), job.how.tp)
        return (y if bias is None else y.add_(bias),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        job = ctx.job
        whole = start_joining(gradient, job.how.tp) if job.how.remake else None
        ingredients, x = _remade(ctx)
        flat = _flat(whole() if whole else joined(gradient, job.how.tp))
        of_x = (flat @ job.layers[0][0]).view(x.shape)
        of_weights = _weight_gradients(job, _flat(x), [flat])
        return None, *_through(x, ingredients, of_x), *of_weights


def _remade(ctx: Any) -> tuple[Sequence[Tensor | None], Tensor]:
    """What is kept, as leaves of a new graph if it is a recipe's; and x made of it."""
    kept = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in kept]
        return leaves, ctx.job.make(*leaves)


def _through(x: Tensor, ingredients: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """The gradients of the ingredients of x."""
    if x is ingredients[0]:
        return [gradient]
    wanted = [t for t in ingredients if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(x, wanted, gradient))
    return [next(found) if t is not None and t.requires_grad else None for t in ingredients]


def _weight_gradients(job: _Job, x: Tensor, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Of each weight and bias, in order; or none, and they are noted to be added later."""
    found: list[Tensor | None] = []
    for (weight, bias), gradient in zip(job.layers, gradients, strict=True):
        if job.how.later is not None:
            job.how.later.append(weight, bias, x, gradient)
        else:
            found += [gradient.t() @ x, None if bias is None else gradient.sum(0)]
    return found


def _flat(x: Tensor) -> Tensor:
    """(tokens, channels). Detached: else what is noted would keep the graph that made it."""
    return x.detach().reshape(-1, x.shape[-1])


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right; a total of 16-bit products may be float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
