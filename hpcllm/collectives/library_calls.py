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
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.collectives.arrays import Array, new_like, overlap
from hpcllm.collectives.group import Group
from hpcllm.collectives.native import counts_of, library_words
from hpcllm.mpi.buffers import LARGEST_MESSAGE_BYTES

FLOAT32 = np.dtype(np.float32)


def allreduce(x: Array, group: Group) -> Array | None:
    n = _count(x)
    if not _may_call("allreduce", n, group):
        return None
    _call(group, n, group.comm.Allreduce, MPI.IN_PLACE, _memory(x))
    return x


def reduce_scatter(x: Array, group: Group, out: Array | None) -> Array | None:
    n = _count(x)
    if not _may_call("reduce_scatter", n, group):
        return None
    counts = counts_of(n, group.size)[0]
    if out is None:
        out = new_like(x, (counts[group.rank],))
    elif not _can_take(out, x, counts[group.rank]):
        return None
    _call(group, n, group.comm.Reduce_scatter, _memory(x), _memory(out), counts)
    return out


def allgather(part: Array, group: Group, out: Array | None) -> Array | None:
    n = _count(part) * group.size
    if not _may_call("allgather", n, group):
        return None
    if out is None:
        shape = part.shape or (1,)
        out = new_like(part, (group.size * shape[0], *shape[1:]))
    elif not _can_take(out, part, n):
        return None
    _call(group, n, group.comm.Allgather, _memory(part), _memory(out))
    return out


def alltoall(x: Array, group: Group, out: Array | None) -> Array | None:
    n = _count(x)
    if n % group.size or not _may_call("alltoall", n, group):
        return None
    if out is None:
        out = new_like(x, x.shape)
    elif not _can_take(out, x, n):
        return None
    _call(group, n, group.comm.Alltoall, _memory(x), _memory(out))
    return out


def broadcast(x: Array, group: Group, root: int) -> Array | None:
    n = _count(x)
    if not 0 <= root < group.size or not _may_call("broadcast", n, group):
        return None
    _call(group, n, group.comm.Bcast, _memory(x), root)
    return x


def _may_call(operation: str, n: int, group: Group) -> bool:
    plan = group.plans.get((operation, n, "raw", torch.float32, "cpu"))
    is_library = plan is not None and plan.algorithm == "native" and not group.broken
    size_bytes = n * FLOAT32.itemsize
    return is_library and 0 < size_bytes <= LARGEST_MESSAGE_BYTES and group.wire.waits.may_block(size_bytes)


def _call(group: Group, n: int, call: Callable[..., object], *arguments: Any) -> None:
    group.wire.waits.block(lambda: library_words(call.__name__, n * FLOAT32.itemsize, group), call, *arguments)


def _count(x: Array) -> int:
    """Number of x's values if the library needs to know no more than where they are; else 0."""
    if type(x) is np.ndarray:
        return x.size if x.dtype is FLOAT32 and x.flags.c_contiguous and x.flags.writeable else 0
    if type(x) is not torch.Tensor or x.dtype is not torch.float32 or not x.is_cpu or x.requires_grad:
        return 0
    return x.numel() if x.is_contiguous() else 0


def _memory(x: Array) -> Any:
    """x as mpi4py takes it; a tensor by its address, as to make a NumPy array of it takes seven times as long."""
    return [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), MPI.FLOAT] if type(x) is torch.Tensor else x


def _can_take(out: Array, x: Array, n: int) -> bool:
    """Say whether n values from x can be written to `out`; where not, operations.py knows why, or how."""
    if type(out) is not type(x) or _count(out) != n:
        return False
    return not (np.may_share_memory(x, out) if type(x) is np.ndarray else overlap(x, out))
