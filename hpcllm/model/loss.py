"""The loss of next-token prediction, as a sum, and its gradient without a tensor to spare.

    forward    logits --log softmax--> l         loss = -sum of l[target]
    backward   l --exp, in place--> softmax      gradient = softmax - (1 at the target), in the memory of l

A sum, because micro-batches and replicas add up to the mean over the global batch only if each brings its sum and
the division happens once, by the number of tokens of the whole step.

The logits are the largest activation of a small model. PyTorch's own cross entropy fills a tensor of zeros for the
gradient of the gathered elements and a further one for the result; here both live in the saved one.

A vocabulary that tp splits:    rank 0  logits 0..V/2    --> log of the sum of exp,  logit of the target, or 0  --+
                                rank 1  logits V/2..V    --> log of the sum of exp,  logit of the target, or 0  --+
two numbers a token are gathered and put together in rank order: all ranks have the same bits, and     both on all <--+
no logit ever travels (arXiv:1909.08053 section 3 sends three, in as many sums).

In pieces, logits of a few tokens exist at once: they are made, used and forgotten, and made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm import collectives
from hpcllm.model.linear import add_product
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, gather_sequence, sum_over_tp

IGNORED = -100  # a target that does not count: the place of a token that is not there


def cross_entropy_sum(logits: Tensor, targets: Tensor, tp: TensorParallel = ALONE, first: int = 0) -> Tensor:
    """Sum over all tokens of -log softmax(logits)[target], in nats; computed in float32 whatever the logits are.

    logits: (batch, sequence, vocabulary) float, of this rank's part of the vocabulary, from `first` on, where tp
    splits it; targets: (batch, sequence) int64, where IGNORED does not count. Returns a float32 scalar, the same on
    all ranks of tp, through which one can go backward once: a second time raises PyTorch's RuntimeError about an
    in-place operation. Collective over tp.
    """
    if tp.size == 1:
        loss: Tensor = _CrossEntropySum.apply(logits.float(), targets)  # type: ignore[no-untyped-call]
        return loss
    split: Tensor = _SplitCrossEntropySum.apply(logits.float(), targets, tp, first)  # type: ignore[no-untyped-call]
    return split


def cross_entropy_sum_in_pieces(
    x: Tensor, weight: Tensor, targets: Tensor, piece: int, tp: TensorParallel = ALONE, first: int = 0
) -> Tensor:
    """Compute cross_entropy_sum of x weight^T, of which no more than `piece` tokens' logits exist at once.

    x: (..., hidden), of this rank's part of the sequence where tp splits it; weight: (vocabulary, hidden) of this
    rank; targets: (...) int64, of the whole sequence as it is gathered. Collective over tp.
    """
    loss: Tensor = _InPieces.apply(x, weight, targets, piece, tp, first)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_softmax = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_softmax, targets)
        counts = targets != IGNORED
        return -(log_softmax.gather(-1, (targets * counts).unsqueeze(-1)).squeeze(-1) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        log_softmax, targets = ctx.saved_tensors
        counts = (targets != IGNORED).unsqueeze(-1)
        weights = upstream * counts
        gradient = log_softmax.exp_().mul_(weights)
        gradient.scatter_add_(-1, targets.unsqueeze(-1) * counts, -weights)
        return gradient, None


class _SplitCrossEntropySum(torch.autograd.Function):
    """Keeps the softmax of this rank's part alone; the share of that part in the whole is a factor a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: TensorParallel, first: int) -> Tensor:
        log_softmax = torch.log_softmax(logits, dim=-1)
        own = logits.amax(-1) - log_softmax.amax(-1)  # log of the sum of exp, without a third pass that needs memory
        rows, here = _rows(targets, first, logits.shape[-1])
        scores = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * here
        whole, scores = _combined(own, scores, tp)
        counts = targets != IGNORED
        ctx.save_for_backward(log_softmax, (own - whole).exp_().mul_(counts), rows, here)
        return ((whole - scores) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        log_softmax, share, rows, here = ctx.saved_tensors
        gradient = log_softmax.exp_().mul_((share * upstream).unsqueeze(-1))
        gradient.scatter_add_(-1, rows.unsqueeze(-1), (here * -upstream).unsqueeze(-1))
        return gradient, None, None, None


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, piece: int, tp: TensorParallel, first: int
    ) -> Tensor:
        whole = gather_sequence(x, tp).flatten(0, -2)
        targets = targets.flatten()
        rows, here = _rows(targets, first, weight.shape[0])
        own, scores = torch.empty(2, *targets.shape, device=whole.device)
        for start in range(0, targets.numel(), piece):
            some = slice(start, start + piece)
            logits = functional.linear(whole[some], weight).float()
            own[some] = torch.logsumexp(logits, dim=-1)
            scores[some] = logits.gather(-1, rows[some].unsqueeze(-1)).squeeze(-1)
            del logits  # before the next ones are made
        normaliser, scores = _combined(own, scores * here, tp)
        counts = targets != IGNORED
        ctx.save_for_backward(x, weight, normaliser, counts, rows, here)
        ctx.piece, ctx.tp = piece, tp
        return ((normaliser - scores) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, normaliser, counts, rows, here = ctx.saved_tensors
        gathered = gather_sequence(x, ctx.tp)
        whole = gathered.flatten(0, -2)
        of_x = torch.empty_like(whole)
        of_weight = weight.new_zeros(weight.shape, dtype=torch.float32)  # a sum over pieces: never in 16 bits
        for start in range(0, rows.numel(), ctx.piece):
            some = slice(start, start + ctx.piece)
            logits = functional.linear(whole[some], weight).float()
            softmax = logits.sub_(normaliser[some].unsqueeze(-1)).exp_().mul_((counts[some] * upstream).unsqueeze(-1))
            softmax.scatter_add_(-1, rows[some].unsqueeze(-1), (here[some] * -upstream).unsqueeze(-1))
            gradient = softmax.to(weight.dtype)
            torch.mm(gradient, weight, out=of_x[some])
            add_product(of_weight, gradient.t(), whole[some])
            del logits, softmax, gradient
        of_x = sum_over_tp(of_x.view(gathered.shape), ctx.tp)
        return of_x.view(x.shape), of_weight.to(weight.dtype), None, None, None, None


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
