r"""One layer over several ranks: what travels between them, as small autograd functions over our own collectives.

                 plain                                            sequence parallel (residual stream split along T)
    x (B, T, D) on every rank                        x (B, T/tp, D), each rank its part of the sequence
        |        backward: sum of gradients              | all-gather           backward: reduce-scatter
    [ columns ]  each rank its outputs               [ columns ]
        |        heads, ffn channels: no traffic         |
    [  rows   ]  each rank a part of every sum       [  rows   ]
        | sum    backward: nothing                       | reduce-scatter       backward: all-gather
    y (B, T, D)                                      y (B, T/tp, D)

A gathered sequence is (tp, B, T/tp, D): as the parts arrive, without a copy. Products and activation functions do not
care which token is which; attention does, and `in_order` puts its tokens in order where it would copy them anyway.

Sources: arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcllm import collectives  # which starts MPI when a rank that is not alone first calls it
from hpcllm.model.shapes import is_adapter, split_dim

if TYPE_CHECKING:
    from hpcllm.collectives import Group, Handle

LANE = "tensor"  # the lane of background collectives: never behind a bucket of gradients
BACKGROUND_BYTES = 1 << 20  # below, handing work to a thread (60 to 100 us) takes longer than what it hides

Wait = Callable[[], Tensor]


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share the layers of this rank, and the codec between them. A value: every layer is handed it."""

    group: Group | None = None  # None: this rank is alone
    rank: int = 0
    size: int = 1
    sequence: bool = False  # between the split layers a rank holds its part of the sequence only
    codec: str = "raw"  # of activations and their gradients

    @property
    def parts(self) -> int:
        """Number of ranks that the sequence is split over."""
        return self.size if self.sequence else 1


ALONE = TensorParallel()


def tensor_parallel(group: Group, sequence: bool = False, codec: str = "raw") -> TensorParallel:
    """Let the ranks of the group share the layers; a group of one rank is ALONE. Collective over the group."""
    if group.size == 1:
        return ALONE
    group.background(LANE)  # made here, where all ranks are, and not in the midst of a backward pass
    return TensorParallel(group, group.rank, group.size, sequence, codec)


def traffic(tp: TensorParallel) -> tuple[float, int, int]:
    """Seconds in which this rank did nothing but wait so far, and bytes it sent, before and after the codec."""
    if tp.group is None:
        return 0.0, 0, 0
    wires = (tp.group.wire, tp.group.background(LANE).wire)
    return wires[0].waits.total_s, sum(wire.plain_bytes for wire in wires), sum(wire.sent_bytes for wire in wires)


def has_partial_gradient(name: str, tp: TensorParallel) -> bool:
    """True if a parameter's gradient is still to be summed over tp.

    Where each rank has seen its part of the sequence: norms and positions; the biases of row layers get theirs from a
    gradient that has been gathered by then. Of an adapter the matrix that is whole: each rank has seen its part of what
    the other one, which is split, reads or writes.
    """
    if is_adapter(name):
        return tp.size > 1 and split_dim(name) is None
    return tp.sequence and ("norm." in name or name.startswith("positions."))


def gather_sequence(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather every rank's x (B, T/tp, D): (tp, B, T/tp, D), or x itself if the sequence is whole.

    Collective over tp.
    """
    return start_gather(x, tp, background=False)()


def sum_over_tp(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum over tp what each rank has a part of, without its gradient. Collective over tp.

    x: (B, T, D), or (tp, B, T/tp, D) where the sequence is split, of which this rank gets its (B, T/tp, D). It is
    overwritten: nobody else may need it.
    """
    return start_sum(x, tp, background=False)()


def sum_with_gradient(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum as `sum_over_tp` does, with a gradient. Collective over tp."""
    if tp.size == 1:
        return x
    y: Tensor = _Sum.apply(x, tp)  # type: ignore[no-untyped-call]
    return y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return sum_over_tp(x.contiguous(), tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(gradient, ctx.tp), None


def start_gather(x: Tensor, tp: TensorParallel, background: bool = True) -> Wait:
    """Start `gather_sequence`, in the background if x is large; the function that this returns waits for the result."""
    if not tp.sequence:
        return lambda: x
    assert tp.group is not None
    x = x.detach().contiguous()
    whole = x.new_empty(tp.size, *x.shape)
    if background and x.nbytes >= BACKGROUND_BYTES:
        return _timed_wait(collectives.iallgather(x, tp.group, tp.codec, out=whole, lane=LANE), tp.group)
    result = collectives.allgather(x, tp.group, tp.codec, out=whole)
    return lambda: result


def start_sum(x: Tensor, tp: TensorParallel, background: bool = True) -> Wait:
    """Start `sum_over_tp`, in the background if x is large; x must not change until the result was waited for."""
    if tp.group is None:
        return lambda: x
    x = x.detach()
    background = background and x.nbytes >= BACKGROUND_BYTES
    if tp.sequence:
        mine = x.new_empty(x.shape[1:])
        if background:
            return _timed_wait(collectives.ireduce_scatter(x, tp.group, tp.codec, out=mine, lane=LANE), tp.group)
        result = collectives.reduce_scatter(x, tp.group, tp.codec, out=mine)
    else:
        if background:
            return _timed_wait(collectives.iallreduce(x, tp.group, tp.codec, lane=LANE), tp.group)
        result = collectives.allreduce(x, tp.group, tp.codec)
    return lambda: result


def _timed_wait(handle: Handle, group: Group) -> Wait:
    def wait() -> Tensor:
        start = time.perf_counter()
        result: Tensor = handle.wait()
        group.wire.waits.total_s += time.perf_counter() - start  # the waits of the background thread are hidden
        return result

    return wait


def in_order(x: Tensor, tp: TensorParallel) -> Tensor:
    """Reorder (tp, B, T/tp, C) -> (B, T, C), each token in its place; x itself where the sequence is not split."""
    return x.transpose(0, 1).flatten(1, 2) if tp.sequence else x


def as_gathered(x: Tensor, tp: TensorParallel) -> Tensor:
    """Reorder (B, T, ...) -> (tp, B, T/tp, ...), the inverse of in_order; x itself where the sequence is not split."""
    return x.view(x.shape[0], tp.size, -1, *x.shape[2:]).transpose(0, 1) if tp.sequence else x
