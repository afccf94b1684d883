"""The loss of next-token prediction, as a sum, and its gradient without a tensor to spare.

    forward    logits --log softmax--> l         loss = -sum of l[target]
    backward   l --exp, in place--> softmax      gradient = softmax - (1 at the target), in the memory of l

A sum, because micro-batches and replicas add up to the mean over the global batch only if each brings its sum and
the division happens once, by the number of tokens of the whole step.

The logits are the largest activation of a small model. PyTorch's own cross entropy fills a tensor of zeros for the
gradient of the gathered elements and a further one for the result; here both live in the saved one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that does not count: the place of a token that is not there


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all tokens of -log softmax(logits)[target], in nats; computed in float32 whatever the logits are.

    logits: (batch, sequence, vocabulary) float; targets: (batch, sequence) int64, where IGNORED does not count. Returns
    a float32 scalar, through which one can go backward once: a second time raises PyTorch's RuntimeError about an
    in-place operation.
    """
    loss: Tensor = _CrossEntropySum.apply(logits.float(), targets)  # type: ignore[no-untyped-call]
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
