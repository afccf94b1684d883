"""Linear layers: alone or split over tensor-parallel ranks, with a backward pass that can come in two halves.

    columns   x --(gathered)--> x w^T + b for each of several layers that read the same x, each rank some of the outputs
    rows      x w^T, each rank some of the inputs --(summed)--> + b

    backward      g ---> sum of g w --(summed)--> x gradient       at once: the stage before waits for it
                     \\                                              the messages travel while weight gradients
                      `-> g^T x, sum of g                           are made, now or when a schedule asks for them:
                          DeferredGradients: (w, b, x, g)           it fills what would be the pipeline's idle time

    adapter       x w^T + s (x a^T) b^T, w frozen: over columns a is whole and b is split by outputs, over rows a is
                  split by inputs and b is whole, so its part of y is a part of the same sum and takes no message

In training weight gradients are added straight to their sums (gradient_sums.py), and the input gradients of layers that
read one tensor (query, key and value; gate and up) by products that add to the first one's. Layers that are alone, in a
pass without sums, with nothing deferred, nothing recomputed and no adapter, are PyTorch's own.
Norms and embeddings have no second half: little is gained by deferring their sums. A layer may be handed a Recompute in
place of x (recompute.py): then it keeps that alone, and one recomputation serves its weight gradient and the gradients
of what x is made of. Source of the halves: arXiv:2401.10241 section 2; of the split: see tensor_parallel.py; of
adapters: arXiv:2106.09685 section 4.1, with s = alpha / rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm.config.schema import GROUP
from hpcllm.model.gradient_sums import GradientSums, add_layer
from hpcllm.model.quantised import QuantisedWeight
from hpcllm.model.recompute import Recompute
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, gather_sequence, start_gather, start_sum, sum_over_tp

Pair = tuple[Tensor, Tensor | None]  # (outputs, inputs) and (outputs,): a matrix that is trained, and its bias


class Adapter(NamedTuple):
    """Two thin matrices, whose product times `scale` is added to a weight; of this rank's part."""

    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)
    scale: float


class Weights(NamedTuple):
    """The parameters of one linear layer, of this rank's part. With an adapter the others are frozen."""

    weight: Tensor | QuantisedWeight  # (outputs, inputs); a frozen one may be of another type than x
    bias: Tensor | None = None  # (outputs,)
    adapter: Adapter | None = None

    @property
    def trained(self) -> list[Pair]:
        """Matrices that get a gradient, in the order of `factors`."""
        if self.adapter is not None:
            return [(self.adapter.a, None), (self.adapter.b, None)]
        return [(self.weight, self.bias)] if isinstance(self.weight, Tensor) and self.weight.requires_grad else []

    def is_plain(self, dtype: torch.dtype) -> bool:
        """True if the layer is one of PyTorch's own for x of this type."""
        return self.adapter is None and isinstance(self.weight, Tensor) and self.weight.dtype == dtype

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (outputs, inputs) in the type of a product."""
        return self.weight.to(dtype) if isinstance(self.weight, Tensor) else self.weight.whole(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x (..., inputs): (..., outputs), with this bias."""
        y = functional.linear(x, self.matrix(x.dtype), bias)
        if self.adapter is not None:
            a, b, scale = self.adapter
            y.view(-1, y.shape[-1]).addmm_(_flat(x) @ a.t(), b.t(), alpha=scale)
        return y

    def narrowed(self, gradient: Tensor) -> Tensor | None:
        """Return the gradient (tokens, rank) of x a^T, given that of the result (tokens, outputs)."""
        return None if self.adapter is None else (gradient @ self.adapter.b).mul_(self.adapter.scale)

    def add_input_gradient(self, total: Tensor | None, gradient: Tensor, narrow: Tensor | None) -> Tensor:
        """Return total + the gradient of x (tokens, inputs); total is overwritten. narrow: as `narrowed` has it."""
        weight = self.matrix(gradient.dtype)
        total = gradient @ weight if total is None else total.addmm_(gradient, weight)
        return total if self.adapter is None or narrow is None else total.addmm_(narrow, self.adapter.a)

    def factors(self, x: Tensor, gradient: Tensor, narrow: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return (g, x) of each matrix in `trained`, whose gradient is g^T x. x (tokens, inputs)."""
        if self.adapter is None or narrow is None:
            return [(gradient, x)] if self.trained else []
        return [(narrow, x), (gradient, (x @ self.adapter.a.t()).mul_(self.adapter.scale))]


Layers = Sequence[Weights]


@dataclass
class DeferredGradients:
    """The weight gradients that one backward pass has left to be added."""

    _entries: list[tuple[Pair, Tensor, Tensor, GradientSums | None]] = field(default_factory=list)  # as they come

    def append(self, pair: Pair, x: Tensor, gradient: Tensor, sums: GradientSums | None) -> None:
        """Note one matrix's; x (tokens, inputs) and gradient (tokens, outputs) must not change until `add`."""
        self._entries.append((pair, x, gradient, sums))

    @torch.no_grad()
    def add(self, added: Callable[[Tensor], None]) -> None:
        """Add everything noted to its sums, or to the parameters' .grad; each entry's memory is free once it is added.

        added: called with a parameter after something was added to its .grad; sums take note by themselves.
        """
        self._entries.reverse()
        while self._entries:
            (weight, bias), x, gradient, sums = self._entries.pop()
            if sums is not None:
                add_layer(sums, weight, bias, x, gradient)
                continue
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
    sums: GradientSums | None = None  # where weight gradients are added; None: to .grad, by autograd


PLAIN = PassOptions()


class Linear(nn.Linear):
    """The parameters of a linear layer: of this rank's part, where tp splits it."""

    adapter_a: nn.Parameter | None
    adapter_b: nn.Parameter | None
    quantised: QuantisedWeight | None  # in place of `weight`

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_parameter("adapter_a", None)
        self.register_parameter("adapter_b", None)
        self.adapter_scale, self.quantised = 0.0, None

    def quantise(self, bits: int, group: int = GROUP) -> None:
        """Hold the weight in 8 or 4 bits from now on, without values. group: inputs with one scale; 0: all of a row."""
        self.quantised = QuantisedWeight(self.out_features, self.in_features, bits, self.weight.device, group)
        self.register_parameter("weight", None)

    def add_adapter(self, rank: int, alpha: float) -> None:
        """Give the layer an adapter without values."""
        self.adapter_a = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.adapter_b = nn.Parameter(self.weight.new_empty(self.out_features, rank))
        self.adapter_scale = alpha / rank

    @property
    def weights(self) -> Weights:
        weight = self.quantised or self.weight
        if self.adapter_a is None or self.adapter_b is None:
            return Weights(weight, self.bias)
        return Weights(weight, self.bias, Adapter(self.adapter_a, self.adapter_b, self.adapter_scale))


def columns(x: Tensor | Recompute, layers: Layers, options: PassOptions = PLAIN) -> tuple[Tensor, ...]:
    """Apply each layer to x (..., inputs): this rank's (..., outputs) of each. Collective over tp.

    Where tp splits the sequence, x is (B, T/tp, inputs) and the results are (tp, B, T/tp, outputs). The gradient of x
    is whole. One exchange forward if the sequence is split, and one, or two, backward.
    """
    if options == PLAIN:
        x = x.value() if isinstance(x, Recompute) else x
        if all(weights.is_plain(x.dtype) for weights in layers):
            return tuple(functional.linear(x, weights.matrix(x.dtype), weights.bias) for weights in layers)
    return _apply(_Columns, x, layers, options)


def rows(x: Tensor | Recompute, layer: Weights, options: PassOptions = PLAIN) -> Tensor:
    """Sum over tp what the layer makes of each rank's part x (..., inputs): (..., outputs). Collective over tp.

    Where tp splits the sequence, x is (tp, B, T/tp, inputs) and the result (B, T/tp, outputs). One exchange forward,
    and one backward if the sequence is split.
    """
    if options == PLAIN:
        x = x.value() if isinstance(x, Recompute) else x
        if layer.is_plain(x.dtype):
            return functional.linear(x, layer.matrix(x.dtype), layer.bias)
    return _apply(_Rows, x, [layer], options)[0]


def _apply(
    kind: type[_Columns | _Rows], x: Tensor | Recompute, layers: Layers, options: PassOptions
) -> tuple[Tensor, ...]:
    """Apply kind. Autograd sees the inputs of x, and what is trained unless its gradients go elsewhere."""
    if isinstance(x, Tensor) or not options.recompute:
        x = Recompute(lambda same: same, (x if isinstance(x, Tensor) else x.value(),))
    elsewhere = options.deferred is not None or options.sums is not None
    trained = () if elsewhere else [tensor for layer in layers for pair in layer.trained for tensor in pair]
    y: tuple[Tensor, ...] = kind.apply(x, layers, options, *x.inputs, *trained)  # type: ignore[no-untyped-call]
    return y


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Recompute, layers: Layers, options: PassOptions, *_: Tensor | None) -> tuple[Tensor, ...]:
        _keep(ctx, x, layers, options)
        whole = gather_sequence(x.value(), options.tp)
        return tuple(weights.product(whole, weights.bias) for weights in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, x = _recomputed(ctx)
        wait_for_whole = start_gather(x, ctx.options.tp)
        flat = [_flat(gradient) for gradient in gradients]
        narrow = [weights.narrowed(gradient) for weights, gradient in zip(ctx.layers, flat, strict=True)]
        total = None
        for weights, gradient, of_adapter in zip(ctx.layers, flat, narrow, strict=True):
            total = weights.add_input_gradient(total, gradient, of_adapter)
        assert total is not None, "there are layers"
        wait_for_sum = start_sum(total.view(*gradients[0].shape[:-1], -1), ctx.options.tp)
        of_weights = _weight_gradients(ctx, _flat(wait_for_whole()), flat, narrow)
        return *_NO_TENSORS, *_input_gradients(x, inputs, wait_for_sum().view(x.shape)), *of_weights


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Recompute, layers: Layers, options: PassOptions, *_: Tensor | None) -> tuple[Tensor]:
        _keep(ctx, x, layers, options)
        (weights,), value = layers, x.value()
        if options.tp.size == 1:
            return (weights.product(value, weights.bias),)
        y = sum_over_tp(weights.product(value, None), options.tp)
        return (y if weights.bias is None else y.add_(weights.bias),)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # worth a thread only if there is something to do meanwhile
        wait_for_whole = start_gather(gradient, ctx.options.tp, background=ctx.options.recompute)
        inputs, x = _recomputed(ctx)
        flat = _flat(wait_for_whole())
        narrow = ctx.layers[0].narrowed(flat)
        of_x = ctx.layers[0].add_input_gradient(None, flat, narrow)
        of_weights = _weight_gradients(ctx, _flat(x), [flat], [narrow])
        return *_NO_TENSORS, *_input_gradients(x, inputs, of_x.view(x.shape)), *of_weights


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


def _weight_gradients(
    ctx: Any, x: Tensor, gradients: Sequence[Tensor], narrow: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of each matrix and bias, in order; none if they are noted for later or added to their sums."""
    found: list[Tensor | None] = []
    deferred, sums = ctx.options.deferred, ctx.options.sums
    for weights, *of_layer in zip(ctx.layers, gradients, narrow, strict=True):
        for (weight, bias), (gradient, read) in zip(weights.trained, weights.factors(x, *of_layer), strict=True):
            if deferred is not None:
                deferred.append((weight, bias), read, gradient, sums)
            elif sums is not None:
                add_layer(sums, weight, bias, read, gradient)
            else:
                found += [gradient.t() @ read, None if bias is None else gradient.sum(0)]
    return found


def _flat(x: Tensor) -> Tensor:
    """Reshape to (tokens, channels), detached: else what is noted would keep the graph that made it."""
    return x.detach().reshape(-1, x.shape[-1])
