"""Nats of each target in next-token prediction, what is made of them, and the gradient without a tensor to spare.

    forward    logits --one pass--> log of the sum of exp, logit of the target     nats = the first less the second
               nats --criterion--> loss, other figures
    backward   logits --one pass, in place--> w (softmax - (1 at the target))       in the memory of the logits

w is the derivative of the loss by a token's nats: one number for all tokens where the loss is their sum, one for each
document where it is made of sums over documents. Either way the logits are passed over once.

Criteria give sums, because micro-batches and replicas add up to the mean over the global batch only if each brings its
sum and the division happens once, by the number of tokens, or samples, of the whole step.

The logits are the largest activation of a small model. PyTorch's own cross entropy writes their log softmax, fills a
tensor of zeros for the gradient of the gathered elements and a further one for the result; here all of it is the memory
of the logits, which stay in 16 bits if they are. Devices do each pass by a kernel (gpu/fused.py); elsewhere PyTorch's
operations go over a strip of tokens after the other: what one of them leaves is still in the cache of a CPU when the
next one reads it.

A vocabulary that tp splits:    rank 0  logits 0..V/2    --> log of the sum of exp,  logit of the target, or 0  --+
                                rank 1  logits V/2..V    --> log of the sum of exp,  logit of the target, or 0  --+
two numbers a token are gathered and put together in rank order: all ranks have the same bits, and     both on all <--+
no logit ever travels (arXiv:1909.08053 section 3 sends three, in as many sums).

In pieces, logits of a few tokens exist at once: they are made, used and forgotten, and made again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm import collectives
from hpcllm.model.gpu import fused
from hpcllm.model.gradient_sums import GradientSums, add_product
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, gather_sequence, sum_over_tp

IGNORED = -100  # a target that does not count: the place of a token that is not there
STRIP_VALUES = 1 << 18  # 1 MiB of float32: a core's own cache holds it
DEVICE_STRIP_VALUES = 1 << 26  # on a device without kernels, where launches cost more than what lies between them


class Criterion(Protocol):
    """Maker of the loss from the nats of a microbatch, and of figures to be logged beside it."""

    @property
    def size(self) -> int:
        """Number of its sums: the loss, then the figures."""

    def __call__(self, nats: Tensor) -> Tensor:
        """Return (size,) float32 sums over the microbatch, of which the first has a gradient.

        nats: (batch, sequence) float32, 0 where a target does not count.
        """


@dataclass(frozen=True)
class Total:
    """Criterion of next-token prediction: the sum over all targets."""

    size: int = 1

    def __call__(self, nats: Tensor) -> Tensor:
        return nats.sum().unsqueeze(0)


def cross_entropy(logits: Tensor, targets: Tensor, tp: TensorParallel = ALONE, first: int = 0) -> Tensor:
    """Return -log softmax(logits)[target] of each token, in nats; computed in float32 whatever the logits are.

    logits: (batch, sequence, vocabulary) float, of this rank's part of the vocabulary, from `first` on, where tp
    splits it; targets: (batch, sequence) int64, where IGNORED does not count: 0 nats. Returns (batch, sequence)
    float32, the same on all ranks of tp, through which one can go backward once: that pass overwrites the logits, and a
    second time raises PyTorch's RuntimeError about an in-place operation. Collective over tp.
    """
    nats: Tensor = _CrossEntropy.apply(logits, targets, tp, first)  # type: ignore[no-untyped-call]
    return nats


def cross_entropy_sum(logits: Tensor, targets: Tensor, tp: TensorParallel = ALONE, first: int = 0) -> Tensor:
    """Sum cross_entropy over all tokens: a float32 scalar. Collective over tp."""
    return cross_entropy(logits, targets, tp, first).sum()


def cross_entropy_in_pieces(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    piece: int,
    tp: TensorParallel = ALONE,
    first: int = 0,
    sums: GradientSums | None = None,
) -> Tensor:
    """Compute cross_entropy of x weight^T, of which no more than `piece` tokens' logits exist at once.

    x: (..., hidden), of this rank's part of the sequence where tp splits it; weight: (vocabulary, hidden) of this
    rank, which may be frozen; targets: (...) int64, of the whole sequence as it is gathered. sums: where the weight's
    gradient is added; None: to its .grad, by autograd. Returns float32 (...). Collective over tp.
    """
    elsewhere = (weight, sums) if sums is not None and weight.requires_grad else None
    seen = weight if elsewhere is None else weight.detach()  # autograd does not see the weight then
    nats: Tensor = _InPieces.apply(x, seen, targets, piece, tp, first, elsewhere)  # type: ignore[no-untyped-call]
    return nats


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits themselves, which the backward pass makes the gradient: three passes over their bytes in all."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: TensorParallel, first: int) -> Tensor:
        logits = logits.contiguous()
        normaliser, scores = _combined(*_statistics(logits, targets, first), tp)
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.first = first
        return (normaliser - scores) * (targets != IGNORED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        return _gradient(logits, targets, ctx.first, normaliser, upstream), None, None, None


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        piece: int,
        tp: TensorParallel,
        first: int,
        elsewhere: tuple[Tensor, GradientSums] | None,
    ) -> Tensor:
        whole, shape = gather_sequence(x, tp).flatten(0, -2), targets.shape
        targets = targets.flatten()
        own, scores = torch.empty(2, *targets.shape, device=whole.device)
        for start in range(0, targets.numel(), piece):
            some = slice(start, start + piece)
            own[some], scores[some] = _statistics(functional.linear(whole[some], weight), targets[some], first)
        normaliser, scores = _combined(own, scores, tp)
        ctx.save_for_backward(x, weight, normaliser, targets)
        ctx.piece, ctx.tp, ctx.first, ctx.elsewhere = piece, tp, first, elsewhere
        return ((normaliser - scores) * (targets != IGNORED)).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, normaliser, targets = ctx.saved_tensors
        upstream = upstream.flatten()
        gathered = gather_sequence(x, ctx.tp)
        whole = gathered.flatten(0, -2)
        of_x = torch.empty_like(whole)
        of_weight, begun = None, False
        if ctx.elsewhere is not None:
            parameter, sums = ctx.elsewhere
            of_weight, begun = sums.total(parameter)
        elif ctx.needs_input_grad[1]:
            of_weight = weight.new_empty(weight.shape, dtype=torch.float32)  # a sum over pieces: never in 16 bits
        for start in range(0, targets.numel(), ctx.piece):
            some = slice(start, start + ctx.piece)
            gradient = _gradient(
                functional.linear(whole[some], weight), targets[some], ctx.first, normaliser[some], upstream[some]
            )
            torch.mm(gradient, weight, out=of_x[some])
            if of_weight is not None:
                add_product(of_weight, gradient.t(), whole[some], begun)
                begun = True
            del gradient  # before the next logits are made
        of_x = sum_over_tp(of_x.view(gathered.shape), ctx.tp)
        if ctx.elsewhere is not None:
            sums.added(parameter)
            of_weight = None
        return of_x.view(x.shape), None if of_weight is None else of_weight.to(weight.dtype), *_NO_TENSORS


_NO_TENSORS = (None,) * 5  # the gradients of all but x and weight


def _statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Log of the sum of exp of each row (..., vocabulary), and the target's logit, or 0 where that is not here.

    logits: contiguous; targets (...). Both results are float32 (...).
    """
    if fused.kernels(logits):
        return fused.row_statistics(logits, targets, first)
    rows, here = _rows(targets, first, logits.shape[-1])
    scores = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * here
    own = torch.empty_like(scores)
    for strip, into in zip(_strips(logits), _strips(logits, own), strict=True):
        torch.logsumexp(strip.float(), dim=-1, out=into)
    return own, scores


def _gradient(logits: Tensor, targets: Tensor, first: int, normaliser: Tensor, upstream: Tensor) -> Tensor:
    """Overwrite the logits (..., vocabulary), contiguous, by their gradient, and return them."""
    if fused.kernels(logits):
        return fused.subtract_one_hot(logits, targets, first, normaliser, upstream)
    rows, here = _rows(targets, first, logits.shape[-1])
    of_tokens = (normaliser, (targets != IGNORED) * upstream, rows, here * -upstream)
    parts = zip(*(_strips(logits, x) for x in of_tokens), strict=True)
    for strip, (own_normaliser, weights, own_rows, ones) in zip(_strips(logits), parts, strict=True):
        softmax = strip.float()  # itself, if that is its type
        softmax.sub_(own_normaliser.unsqueeze(-1)).exp_().mul_(weights.unsqueeze(-1))
        _add_at(softmax, own_rows, ones)
        if softmax is not strip:
            strip.copy_(softmax)
    return logits


def _strips(logits: Tensor, of_tokens: Tensor | None = None) -> Sequence[Tensor]:
    """Views of some tokens each: of the logits, (tokens, vocabulary), or of a tensor of a number a token, (tokens,)."""
    tokens = max(1, (STRIP_VALUES if logits.is_cpu else DEVICE_STRIP_VALUES) // logits.shape[-1])
    return torch.split(logits.flatten(0, -2) if of_tokens is None else of_tokens.flatten(), tokens)


def _add_at(gradient: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add to each token's gradient (..., vocabulary), contiguous, in place, its value at its row; both of shape (...).

    Rows are known to be inside. Under deterministic algorithms scatter_add_ and index_put_ on a device make the host
    read the largest and the smallest index first, and so wait for all that is queued, once a microbatch; with `unsafe`
    nothing is read, and the device sorts the tokens' indices, which takes microseconds. The bits are scatter_add_'s:
    one value is added to one element of each token.
    """
    tokens = torch.arange(rows.numel(), device=rows.device)
    places = tokens.mul_(gradient.shape[-1]).add_(rows.flatten())
    torch.ops.aten._index_put_impl_(gradient.view(-1), [places], values.flatten(), True, True)  # accumulate, unsafe


def _rows(targets: Tensor, first: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Row of the target among this rank's `vocabulary`, and 1 where it is there; else 0 and 0."""
    rows = targets - first
    here = (rows >= 0) & (rows < vocabulary) & (targets != IGNORED)
    return rows.masked_fill_(~here, 0), here.float()


def _combined(own: Tensor, scores: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Log of the sum of exp over all ranks, and the target's logit, of each token; the same bits on all ranks."""
    if tp.size == 1:
        return own, scores
    assert tp.group is not None
    all_own, all_scores = collectives.allgather(torch.stack([own, scores]).unsqueeze(0), tp.group).unbind(1)
    return torch.logsumexp(all_own, dim=0), all_scores.sum(0)
