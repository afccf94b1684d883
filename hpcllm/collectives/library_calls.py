"""The library's blocking call at once, where nothing is left to decide: the short way into small collectives.

    fp32 values, contiguous, of NumPy or of a torch tensor on the CPU
    `auto` took the library for so many of them before                  -->  comm.Allgather(memory, into)
    its waits may block, and nothing has failed here                    otherwise None: operations.py goes on

The general way takes 15 to 100 us to check and plan, the library 5 to move 4 KiB. Each function does what that of the
same name in operations.py does, or returns None before anything was sent. A rank may go either way, whatever the others
do: there, too, the end is the same call of the library, with the same types (native.py).

Tensors that stay where they are, as those of a training loop do, are described to mpi4py once: their calls are kept by
address, and what may have changed about a tensor of that address is looked at each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcllm.collectives.arrays import Array, new_like, overlap
from hpcllm.collectives.group import Group
from hpcllm.collectives.native import counts_of, library_words
from hpcllm.mpi.buffers import LARGEST_MESSAGE_BYTES

FLOAT32 = torch.float32
MOST_CALLS = 1024  # kept; who has more arrays than that moves them about
NAMES = {
    "allreduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter",
    "allgather": "Allgather",
    "alltoall": "Alltoall",
    "broadcast": "Bcast",
}


@dataclass(slots=True, eq=False)
class ReadyCall:
    """A call of the library with its arguments, for tensors of these lengths; kept by their addresses."""

    call: Callable[[], object]
    counts: tuple[int, ...]  # values of each tensor
    size_bytes: int  # of all values, as the waits count them
    words: Callable[[], str]  # names the call where it is waited for


def allreduce(x: Array, group: Group) -> Array | None:
    if type(x) is Tensor:
        ready = group.ready_calls.get(("allreduce", x.data_ptr()))
        if not (ready and _is_plain(x, ready.counts[0])):
            ready = _describe("allreduce", group, x)
    else:
        ready = _of_numpy("allreduce", group, x)
    return x if ready and _call(ready, group) else None


def reduce_scatter(x: Array, group: Group, out: Array | None) -> Array | None:
    if out is None:
        if not _goes_to_library("reduce_scatter", x, group):
            return None
        out = new_like(x, (counts_of(_count(x), group.size)[0][group.rank],))
    return _from_one_to_another("reduce_scatter", x, out, group)


def allgather(part: Array, group: Group, out: Array | None) -> Array | None:
    if out is None:
        if not _goes_to_library("allgather", part, group):
            return None
        shape = part.shape or (1,)
        out = new_like(part, (group.size * shape[0], *shape[1:]))
    return _from_one_to_another("allgather", part, out, group)


def alltoall(x: Array, group: Group, out: Array | None) -> Array | None:
    if out is None:
        if not _goes_to_library("alltoall", x, group):
            return None
        out = new_like(x, x.shape)
    return _from_one_to_another("alltoall", x, out, group)


def broadcast(x: Array, group: Group, root: int) -> Array | None:
    if type(x) is Tensor:
        ready = group.ready_calls.get(("broadcast", x.data_ptr(), root))
        if not (ready and _is_plain(x, ready.counts[0])):
            ready = _describe("broadcast", group, x, root=root)
    else:
        ready = _of_numpy("broadcast", group, x, root=root)
    return x if ready and _call(ready, group) else None


def _from_one_to_another(operation: str, x: Array, out: Array, group: Group) -> Array | None:
    """Make the call that reads x and writes `out`, which is returned."""
    if type(x) is Tensor and type(out) is Tensor:
        ready = group.ready_calls.get((operation, x.data_ptr(), out.data_ptr()))
        if not (ready and _is_plain(x, ready.counts[0]) and _is_plain(out, ready.counts[1])):
            ready = _describe(operation, group, x, out)
    else:
        ready = _of_numpy(operation, group, x, out)
    return out if ready and _call(ready, group) else None


def _is_plain(x: Tensor, n: int) -> bool:
    """Say whether a tensor is n contiguous fp32 values on the CPU, of which the library needs but the place."""
    return x.numel() == n and x.dtype is FLOAT32 and x.is_cpu and not x.requires_grad and x.is_contiguous()


def _is_plain_array(x: Array) -> bool:
    return type(x) is np.ndarray and x.dtype == np.float32 and x.flags.c_contiguous and x.flags.writeable


def _call(ready: ReadyCall, group: Group) -> bool:
    """Make the call, unless an earlier collective failed here or the waits do not let it block. True if it was made."""
    if group.broken:
        return False
    waits = group.wire.waits
    if waits.limit_s is None:  # as Waits.block does, without a call more
        ready.call()
    elif waits.may_block(ready.size_bytes):
        waits.block(ready.words, ready.call)
    else:
        return False
    return True


def _describe(operation: str, group: Group, *arrays: Tensor, root: int | None = None) -> ReadyCall | None:
    """The call for these tensors, kept from now on; None: `auto` takes another way, or operations.py has to look."""
    if not all(_is_plain(x, x.numel()) for x in arrays):
        return None
    places = [x.data_ptr() for x in arrays]
    memory = [[MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), MPI.FLOAT] for x in arrays]
    ready = _prepare(operation, group, arrays, memory, root)
    if ready:
        if len(group.ready_calls) >= MOST_CALLS:
            group.ready_calls.clear()
        group.ready_calls[(operation, *places) if root is None else (operation, *places, root)] = ready
    return ready


def _of_numpy(operation: str, group: Group, *arrays: Array, root: int | None = None) -> ReadyCall | None:
    """The call for NumPy's arrays; not kept: to ask for their addresses takes longer than to describe them."""
    if not all(_is_plain_array(x) for x in arrays):
        return None
    return _prepare(operation, group, arrays, list(arrays), root)


def _prepare(
    operation: str, group: Group, arrays: tuple[Array, ...], memory: list[Any], root: int | None
) -> ReadyCall | None:
    counts = tuple(_count(x) for x in arrays)
    n = counts[-1] if operation == "allgather" else counts[0]
    if not _is_native(operation, n, group) or not _fit(operation, n, counts, group):
        return None
    if len(arrays) == 2 and _share_memory(*arrays):
        return None  # whether that is right is for operations.py to say
    if root is not None and not 0 <= root < group.size:
        return None
    name, size_bytes = NAMES[operation], n * FLOAT32.itemsize
    before = [MPI.IN_PLACE] if operation == "allreduce" else []
    after = [counts_of(n, group.size)[0]] if operation == "reduce_scatter" else [] if root is None else [root]
    call = partial(getattr(group.comm, name), *before, *memory, *after)
    return ReadyCall(call, counts, size_bytes, lambda: library_words(name, size_bytes, group))


def _goes_to_library(operation: str, x: Array, group: Group) -> bool:
    """Say whether the call for x, whose result is yet to be made, is the library's."""
    if not (_is_plain(x, x.numel()) if type(x) is Tensor else _is_plain_array(x)):
        return False
    n = _count(x)
    return _is_native(operation, n * group.size if operation == "allgather" else n, group)


def _is_native(operation: str, n: int, group: Group) -> bool:
    """Say whether `auto` took the library for n values before, which one message can carry."""
    plan = group.plans.get((operation, n, "raw", FLOAT32, "cpu"))
    return plan is not None and plan.algorithm == "native" and 0 < n * FLOAT32.itemsize <= LARGEST_MESSAGE_BYTES


def _fit(operation: str, n: int, counts: tuple[int, ...], group: Group) -> bool:
    """Say whether the lengths of the arrays are those that the operation asks for."""
    size = group.size
    match operation:
        case "reduce_scatter":
            return counts[1] == counts_of(n, size)[0][group.rank]
        case "allgather":
            return counts[0] * size == n
        case "alltoall":
            return n % size == 0 and counts[1] == n
    return True


def _count(x: Array) -> int:
    return x.size if type(x) is np.ndarray else x.numel()


def _share_memory(x: Array, out: Array) -> bool:
    return np.may_share_memory(x, out) if type(x) is np.ndarray else overlap(x, out)
