"""Linear layers: alone or split over tensor-parallel ranks, with a backward pass that can come in two halves.

    columns   x --(gathered)--> x w^T + b for each of several layers that read the same x, each rank some of the outputs
    rows      x w^T, each rank some of the inputs --(summed)--> + b

    backward      g ---> sum of g w --(summed)--> x gradient       at once: the stage before waits for it
                     \\                                              the messages travel while weight gradients
                      `-> g^T x, sum of g                           are made, now or when a schedule asks for them:
                          DeferredGradients: (w, b, x, g)           it fills what would be the pipeline's idle time

Layers that are alone, with nothing deferred and nothing recomputed, are PyTorch's own and cost what they cost there.
Norms and embeddings have no second half: little is gained by deferring their sums. A layer may be handed a Recompute in
place of x (recompute.py): then it keeps that alone, and one recomputation serves its weight gradient and the gradients
of what x is made of. Source of the halves: arXiv:2401.10241 section 2; of the split: see tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm.model.recompute import Recompute
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, gather_sequence, start_gather, start_sum, sum_over_tp

Weights = tuple[Tensor, Tensor | None]  # (outputs, inputs) and (outputs,): weight and bias
Layers = Sequence[Weights]


@dataclass
class DeferredGradients:
    """The weight gradients that one backward pass has left to be added."""

    _entries: list[tuple[Weights, Tensor, Tensor]] = field(default_factory=list)  # in the order of the backward pass

    def append(self, weights: Weights, x: Tensor, gradient: Tensor) -> None:
        """Note one layer's; x (tokens, inputs) and gradient (tokens, outputs) must not change until `add`."""
        self._entries.append((weights, x, gradient))

    @torch.no_grad()
    def add(self, added: Callable[[Tensor], None]) -> None:
        """Add everything noted to the parameters' .grad; each entry's memory is free once it is added.

        added: called with a parameter after something was added to its .grad.
        """
        self._entries.reverse()
        while self._entries:
            (weight, bias), x, gradient = self._entries.pop()
            if weight.grad is None:
                weight.grad = gradient.t() @ x
            else:
                weight.grad.addmm_(gradient.t(), x)
            added(weight)
            if bias is not None:
                of_bias = gradient.sum(0)
                bias.grad = of_bias if bias.grad is None else bias.grad.add_(of_bias)
                added(bias)


@dataclass(frozen=True)
class PassOptions:
    """Options of one forward pass, and of the backward pass that follows it, for all layers."""

    tp: TensorParallel = ALONE
    deferred: DeferredGradients | None = None  # where linear layers leave their weight gradients; None: in .grad
    recompute: bool = False  # a layer that is handed a Recompute keeps it in place of its value


PLAIN = PassOptions()


class Linear(nn.Linear):
    """The parameters of a linear layer: of this rank's part, where tp splits it."""

    @property
    def weights(self) -> Weights:
        return self.weight, self.bias


def columns(x: Tensor | Recompute, layers: Layers, options: PassOptions = PLAIN) -> tuple[Tensor, ...]:
    """Apply each layer to x (..., inputs): this rank's (..., outputs) of each. Collective over tp.

    Where tp splits the sequence, x is (B, T/tp, inputs) and the results are (tp, B, T/tp, outputs). The gradient of x
    is whole. One exchange forward if the sequence is split, and one, or two, backward.
    """
    if options.recompute or options.tp.size > 1:
        return _apply(_Columns, x, layers, options)
    x = x.value() if isinstance(x, Recompute) else x
    if options.deferred is None:
        return tuple(functional.linear(x, *weights) for weights in layers)
    return tuple(y for weights in layers for y in _apply(_Columns, x, [weights], options))


def rows(x: Tensor | Recompute, layer: Weights, options: PassOptions = PLAIN) -> Tensor:
    """Sum over tp what the layer makes of each rank's part x (..., inputs): (..., outputs). Collective over tp.

    Where tp splits the sequence, x is (tp, B, T/tp, inputs) and the result (B, T/tp, outputs). One exchange forward,
    and one backward if the sequence is split.
    """
    if options == PLAIN:
        return functional.linear(x.value() if isinstance(x, Recompute) else x, *layer)
    return _apply(_Rows, x, [layer], options)[0]


def _apply(
    kind: type[_Columns | _Rows], x: Tensor | Recompute, layers: Layers, options: PassOptions
) -> tuple[Tensor, ...]:
    """Apply kind. Autograd sees the inputs of x, and the weights unless their gradients are deferred."""
    if isinstance(x, Tensor) or not options.recompute:
        x = Recompute(lambda same: same, (x if isinstance(x, Tensor) else x.value(),))
    weights = () if options.deferred is not None else [tensor for layer in layers for tensor in layer]
    y: tuple[Tensor, ...] = kind.apply(x, layers, options, *x.inputs, *weights)  # type: ignore[no-untyped-call]
    return y


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Recompute, layers: Layers, options: PassOptions, *_: Tensor | None) -> tuple[Tensor, ...]:
        _keep(ctx, x, layers, options)
        whole = gather_sequence(x.value(), options.tp)
        return tuple(functional.linear(whole, *weights) for weights in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, x = _recomputed(ctx)
        wait_for_whole = start_gather(x, ctx.options.tp)
        flat = [_flat(gradient) for gradient in gradients]
        total = flat[0] @ ctx.layers[0][0]
        for gradient, (weight, _) in zip(flat[1:], ctx.layers[1:], strict=True):
            total.addmm_(gradient, weight)
        wait_for_sum = start_sum(total.view(*gradients[0].shape[:-1], -1), ctx.options.tp)
        of_weights = _weight_gradients(ctx, _flat(wait_for_whole()), flat)
        return *_NO_TENSORS, *_input_gradients(x, inputs, wait_for_sum().view(x.shape)), *of_weights


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Recompute, layers: Layers, options: PassOptions, *_: Tensor | None) -> tuple[Tensor]:
        _keep(ctx, x, layers, options)
        ((weight, bias),), value = layers, x.value()
        if options.tp.size == 1:
            return (functional.linear(value, weight, bias),)
        y = sum_over_tp(functional.linear(value, weight), options.tp)
        return (y if bias is None else y.add_(bias),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # worth a thread only if there is something to do meanwhile
        wait_for_whole = start_gather(gradient, ctx.options.tp, background=ctx.options.recompute)
        inputs, x = _recomputed(ctx)
        flat = _flat(wait_for_whole())
        of_x = (flat @ ctx.layers[0][0]).view(x.shape)
        of_weights = _weight_gradients(ctx, _flat(x), [flat])
        return *_NO_TENSORS, *_input_gradients(x, inputs, of_x), *of_weights


_NO_TENSORS = (None,) * 3  # the gradients of x, layers and options


def _keep(ctx: Any, x: Recompute, layers: Layers, options: PassOptions) -> None:
    ctx.function, ctx.layers, ctx.options = x.function, layers, options
    ctx.save_for_backward(*x.inputs)


def _recomputed(ctx: Any) -> tuple[Sequence[Tensor | None], Tensor]:
    """The inputs that were kept, as leaves of a new graph; and x made of them."""
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        return leaves, ctx.function(*leaves)


def _input_gradients(x: Tensor, inputs: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs that x is made of."""
    if x is inputs[0]:
        return [gradient]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(x, wanted, gradient))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def _weight_gradients(ctx: Any, x: Tensor, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each weight and bias, in order; none if they are deferred: then they are noted instead."""
    found: list[Tensor | None] = []
    for (weight, bias), gradient in zip(ctx.layers, gradients, strict=True):
        if ctx.options.deferred is not None:
            ctx.options.deferred.append((weight, bias), x, gradient)
        else:
            found += [gradient.t() @ x, None if bias is None else gradient.sum(0)]
    return found


def _flat(x: Tensor) -> Tensor:
    """Reshape to (tokens, channels), detached: else what is noted would keep the graph that made it."""
    return x.detach().reshape(-1, x.shape[-1])


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to total, in place; a total of 16-bit products may be float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
