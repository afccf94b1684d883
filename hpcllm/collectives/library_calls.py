"""The library's blocking call at once, where nothing is left to decide: the short way into small collectives.

    fp32 values, contiguous, of NumPy or of a torch tensor on the CPU
    `auto` took the library for so many of them before                  -->  comm.Allgather(memory, into)
    its waits may block, and nothing has failed here                    otherwise None: operations.py goes on

The general way takes 15 to 100 us to check and plan, the library 5 to move 4 KiB. Each function does what that of the
same name in operations.py does, or returns None before anything was sent. A rank may go either way, whatever the others
do: there, too, the end is the same call of the library, with the same types (native.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.collectives.arrays import Array, new_like, overlap
from hpcllm.collectives.group import Group
from hpcllm.collectives.native import counts_of, library_words
from hpcllm.mpi.buffers import LARGEST_MESSAGE_BYTES

FLOAT32 = np.dtype(np.float32)


@dataclass(slots=True, eq=False)
class ReadyCall:
    """A call of the library for arrays of one length, kept in Group.ready_calls.

    Tensors that stay where they are, as those of a training loop do, are described to mpi4py once: to do it anew takes
    half as long as all the rest.
    """

    call: Callable[..., object]
    size_bytes: int  # of all values, as the waits count them
    words: Callable[[], str]  # names the call where it is waited for
    after: tuple[Any, ...]  # arguments behind the arrays
    places: tuple[int, ...] = ()  # addresses of the tensors of the last call
    memory: tuple[Any, ...] = ()  # the same as mpi4py takes them


def allreduce(x: Array, group: Group) -> Array | None:
    ready = _ready("allreduce", _count(x), group)
    if ready is None:
        return None
    _call(ready, group, MPI.IN_PLACE, *_memory(ready, x))
    return x


def reduce_scatter(x: Array, group: Group, out: Array | None) -> Array | None:
    ready = _ready("reduce_scatter", _count(x), group)
    if ready is None:
        return None
    own = ready.after[0][group.rank]
    if out is None:
        out = new_like(x, (own,))
    elif not _can_take(ready, out, x, own):
        return None
    _call(ready, group, *_memory(ready, x, out))
    return out


def allgather(part: Array, group: Group, out: Array | None) -> Array | None:
    n = _count(part) * group.size
    ready = _ready("allgather", n, group)
    if ready is None:
        return None
    if out is None:
        shape = part.shape or (1,)
        out = new_like(part, (group.size * shape[0], *shape[1:]))
    elif not _can_take(ready, out, part, n):
        return None
    _call(ready, group, *_memory(ready, part, out))
    return out


def alltoall(x: Array, group: Group, out: Array | None) -> Array | None:
    n = _count(x)
    ready = _ready("alltoall", n, group)
    if ready is None or n % group.size:
        return None
    if out is None:
        out = new_like(x, x.shape)
    elif not _can_take(ready, out, x, n):
        return None
    _call(ready, group, *_memory(ready, x, out))
    return out


def broadcast(x: Array, group: Group, root: int) -> Array | None:
    ready = _ready("broadcast", _count(x), group)
    if ready is None or not 0 <= root < group.size:
        return None
    _call(ready, group, *_memory(ready, x), root)
    return x


NAMES = {
    "allreduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter",
    "allgather": "Allgather",
    "alltoall": "Alltoall",
    "broadcast": "Bcast",
}


def _ready(operation: str, n: int, group: Group) -> ReadyCall | None:
    """The call, if nothing keeps it from being made at once."""
    ready = group.ready_calls.get((operation, n)) or _prepare(operation, n, group)
    if ready is None or group.broken:
        return None
    waits = group.wire.waits
    return ready if waits.limit_s is None or waits.may_block(ready.size_bytes) else None


def _prepare(operation: str, n: int, group: Group) -> ReadyCall | None:
    plan = group.plans.get((operation, n, "raw", torch.float32, "cpu"))
    size_bytes = n * FLOAT32.itemsize
    if plan is None or plan.algorithm != "native" or not 0 < size_bytes <= LARGEST_MESSAGE_BYTES:
        return None
    name = NAMES[operation]
    after = (counts_of(n, group.size)[0],) if operation == "reduce_scatter" else ()
    ready = ReadyCall(
        getattr(group.comm, name), size_bytes, lambda: library_words(name, size_bytes, group), after
    )  # fmt: skip
    group.ready_calls[operation, n] = ready
    return ready


def _call(ready: ReadyCall, group: Group, *arguments: Any) -> None:
    waits = group.wire.waits
    if waits.limit_s is None:  # as Waits.block does, without a call more
        ready.call(*arguments, *ready.after)
    else:
        waits.block(ready.words, ready.call, *arguments, *ready.after)


def _count(x: Array) -> int:
    """Number of x's values if the library needs to know no more than where they are; else 0."""
    if type(x) is np.ndarray:
        return x.size if x.dtype is FLOAT32 and x.flags.c_contiguous and x.flags.writeable else 0
    if type(x) is not torch.Tensor or x.dtype is not torch.float32 or not x.is_cpu or x.requires_grad:
        return 0
    return x.numel() if x.is_contiguous() else 0


def _memory(ready: ReadyCall, *arrays: Array) -> tuple[Any, ...]:
    """Arrays as mpi4py takes them; tensors by address, as to make a NumPy array of one takes seven times as long."""
    if type(arrays[0]) is not torch.Tensor:
        return arrays
    places = tuple([x.data_ptr() for x in arrays])
    if places != ready.places:
        pairs = zip(places, arrays, strict=True)
        ready.memory = tuple([[MPI.buffer.fromaddress(place, x.nbytes), MPI.FLOAT] for place, x in pairs])
        ready.places = places
    return ready.memory


def _can_take(ready: ReadyCall, out: Array, x: Array, n: int) -> bool:
    """Say whether n values from x can be written to `out`; where not, operations.py knows why, or how."""
    if type(out) is not type(x) or _count(out) != n:
        return False
    if type(x) is np.ndarray:
        return not np.may_share_memory(x, out)
    return (x.data_ptr(), out.data_ptr()) == ready.places or not overlap(x, out)
