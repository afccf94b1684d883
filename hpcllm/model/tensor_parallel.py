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

if TYPE_CHECKING:
    from hpcllm.collectives import Group, Handle

LANE = "tensor"  # of nonblocking.py: never behind a bucket of gradients
BACKGROUND_BYTES = 1 << 20  # below, handing work to a thread (60 to 100 us) takes longer than what it hides

Wait = Callable[[], Tensor]


@dataclass(frozen=True)
class TensorParallel:
    """Who shares the layers of this rank, and how what they exchange travels. A value: every layer is handed it."""

    group: Group | None = None  # None: this rank is alone
    rank: int = 0
    size: int = 1
    sequence: bool = False  # between the split layers a rank holds its part of the sequence only
    codec: str = "raw"  # of activations and their gradients

    @property
    def parts(self) -> int:
        """How many ranks the sequence is split over."""
        return self.size if self.sequence else 1


ALONE = TensorParallel()


def tensor_parallel(group: Group, sequence: bool = False, codec: str = "raw") -> TensorParallel:
    """The ranks of the group share the layers; a group of one rank is ALONE. Collective over the group."""
    if group.size == 1:
        return ALONE
    group.background(LANE)  # made here, where all ranks are, and not in the midst of a backward pass
    return TensorParallel(group, group.rank, group.size, sequence, codec)


def traffic(tp: TensorParallel) -> tuple[float, int, int]:
    """Of this rank so far: seconds in which it did nothing but wait, and bytes sent, before and after the codec."""
    if tp.group is None:
        return 0.0, 0, 0
    wires = (tp.group.wire, tp.group.background(LANE).wire)
    return wires[0].waits.total_s, sum(wire.plain_bytes for wire in wires), sum(wire.sent_bytes for wire in wires)


def summed_over_tp(name: str, tp: TensorParallel) -> bool:
    """Whether a parameter's gradient is still to be summed over tp, each rank having seen its part of the sequence.

    Norms and positions, then; the biases of row layers get theirs from a gradient that has been gathered by then.
    """
    return tp.sequence and ("norm." in name or name.startswith("positions."))


def joined(x: Tensor, tp: TensorParallel) -> Tensor:
    """What column layers read: x itself, or (tp, B, T/tp, D) of every rank's x (B, T/tp, D). Collective over tp."""
    return _gathered(x, tp)() if tp.sequence else x


def reduced(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum over tp, with its gradient: the end of what each rank has a part of. Collective over tp.

    x: (B, T, D), or (tp, B, T/tp, D) where the sequence is split, of which this rank gets its (B, T/tp, D). It is
    overwritten: nobody else may need it.
    """
    if tp.size == 1:
        return x
    y: Tensor = _Reduced.apply(x, tp)  # type: ignore[no-untyped-call]
    return y


def summed(x: Tensor, tp: TensorParallel) -> Tensor:
    """`reduced`, without its gradient. Collective over tp."""
    return x if tp.size == 1 else _summed(x, tp)()


def start_joining(x: Tensor, tp: TensorParallel) -> Wait:
    """`joined`, in the background if x is large: the function that this returns waits for the result."""
    return _gathered(x, tp, x.nbytes >= BACKGROUND_BYTES) if tp.sequence else lambda: x


def start_summing(x: Tensor, tp: TensorParallel) -> Wait:
    """`summed`, in the background if x is large; x must not change meanwhile."""
    return _summed(x, tp, x.nbytes >= BACKGROUND_BYTES) if tp.size > 1 else lambda: x


def in_order(x: Tensor, tp: TensorParallel) -> Tensor:
    """(tp, B, T/tp, C) -> (B, T, C), each token in its place; x itself where the sequence is not split."""
    return x.transpose(0, 1).flatten(1, 2) if tp.sequence else x


def as_gathered(x: Tensor, tp: TensorParallel) -> Tensor:
    """(B, T, ...) -> (tp, B, T/tp, ...), the inverse of in_order; x itself where the sequence is not split."""
    return x.view(x.shape[0], tp.size, -1, *x.shape[2:]).transpose(0, 1) if tp.sequence else x


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _summed(x.contiguous(), tp)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return joined(gradient, ctx.tp), None


def _summed(x: Tensor, tp: TensorParallel, background: bool = False) -> Wait:
    assert tp.group is not None
    x = x.detach()
    if not tp.sequence:
        if background:
            return _result(collectives.iallreduce(x, tp.group, tp.codec, lane=LANE), tp.group)
        return _value(collectives.allreduce(x, tp.group, tp.codec))
    mine = x.new_empty(x.shape[1:])
    if background:
        return _result(collectives.ireduce_scatter(x, tp.group, tp.codec, out=mine, lane=LANE), tp.group)
    return _value(collectives.reduce_scatter(x, tp.group, tp.codec, out=mine))


def _gathered(x: Tensor, tp: TensorParallel, background: bool = False) -> Wait:
    assert tp.group is not None
    x = x.detach().contiguous()
    whole = x.new_empty(tp.size, *x.shape)
    if background:
        return _result(collectives.iallgather(x, tp.group, tp.codec, out=whole, lane=LANE), tp.group)
    return _value(collectives.allgather(x, tp.group, tp.codec, out=whole))


def _value(result: Tensor) -> Wait:
    return lambda: result


def _result(handle: Handle, group: Group) -> Wait:
    def wait() -> Tensor:
        start = time.perf_counter()
        result: Tensor = handle.wait()
        group.wire.waits.total_s += time.perf_counter() - start  # what the thread itself waited is hidden
        return result

    return wait
