"""The library's blocking call at once, where nothing is left to decide: the short way into small collectives.

    fp32 values, contiguous, of NumPy or of a torch tensor on the CPU
    `auto` took the library, uncompressed, for so many of them before   -->  comm.Allgather(memory, into)
    its waits may block, and nothing has failed here                    otherwise nothing: operations.py goes on

The general way takes 15 to 100 us to check and plan, the library 5 to move 4 KiB. The functions do what operations.py
does, or say that they did not, before anything was sent. A rank may go either way, whatever the others do: there, too,
the end is the same call of the library, with the same types (native.py).

Tensors that stay where they are, as those of a training loop do, are described to mpi4py once: their calls are kept by
address, and what may have changed about a tensor of that address is looked at each time. That look is written out where
it is needed: behind an array that has emptied the caches, a call of Python more takes 0.2 us.
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

from hpcllm.codecs.protocol import Codec
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
    n: int  # values of x
    n_out: int  # and of `out`; 0 where the call is in place
    size_bytes: int  # of all values, as the waits count them
    words: Callable[[], str]  # names the call where it is waited for


def call_in_place(operation: str, x: Array, group: Group, codec: str | Codec, root: int | None = None) -> bool:
    """Sum or broadcast x where it is. True if that was done."""
    if type(codec) is not str:
        return False
    if type(x) is Tensor:
        ready = group.ready_calls.get((operation, codec, root, x.data_ptr()))
        if not (ready and x.numel() == ready.n and x.dtype is FLOAT32 and x.is_cpu and x.is_contiguous()):
            ready = _describe(operation, group, codec, x, root=root)
    else:
        ready = _of_numpy(operation, group, codec, x, root=root)
    if not ready or group.broken:
        return False
    if group.wire.waits.limit_s is None:
        ready.call()
        return True
    return _call_within_limit(ready, group)


def call_between(operation: str, x: Array, out: Array | None, group: Group, codec: str | Codec) -> Array | None:
    """Make the call that reads x and writes `out`, or a new array. Returns that, None if nothing was done."""
    if type(codec) is not str:
        return None
    if out is None:
        out = _new_out(operation, x, group, codec)
    if type(x) is Tensor and type(out) is Tensor:
        ready = group.ready_calls.get((operation, codec, x.data_ptr(), out.data_ptr()))
        if not (
            ready
            and (x.numel() == ready.n and x.dtype is FLOAT32 and x.is_cpu and x.is_contiguous())
            and (out.numel() == ready.n_out and out.dtype is FLOAT32 and out.is_cpu and out.is_contiguous())
        ):
            ready = _describe(operation, group, codec, x, out)
    else:
        ready = _of_numpy(operation, group, codec, x, out)
    if not ready or group.broken:
        return None
    if group.wire.waits.limit_s is None:
        ready.call()
        return out
    return out if _call_within_limit(ready, group) else None


def _call_within_limit(ready: ReadyCall, group: Group) -> bool:
    """Make the call if these waits let it block. True if it was made."""
    waits = group.wire.waits
    if waits.may_block(ready.size_bytes):
        waits.block(ready.words, ready.call)
        return True
    return False


def _is_plain(x: Array) -> bool:
    """Say whether an array is contiguous fp32 values on the CPU, of which the library needs but the place."""
    if type(x) is Tensor:
        return x.dtype is FLOAT32 and x.is_cpu and x.is_contiguous()
    return type(x) is np.ndarray and x.dtype == np.float32 and x.flags.c_contiguous and x.flags.writeable


def _describe(operation: str, group: Group, codec: str, *arrays: Tensor, root: int | None = None) -> ReadyCall | None:
    """The call for these tensors, kept from now on; None: `auto` takes another way, or operations.py has to look."""
    if not all(map(_is_plain, arrays)):
        return None
    places = [x.data_ptr() for x in arrays]
    memory = [[MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), MPI.FLOAT] for x in arrays]
    ready = _prepare(operation, group, codec, arrays, memory, root)
    if ready:
        if len(group.ready_calls) >= MOST_CALLS:
            group.ready_calls.clear()
        group.ready_calls[(operation, codec, *places) if len(places) == 2 else (operation, codec, root, *places)] = (
            ready
        )
    return ready


def _of_numpy(operation: str, group: Group, codec: str, *arrays: Array, root: int | None = None) -> ReadyCall | None:
    """The call for NumPy's arrays; not kept: to ask for their addresses takes longer than to describe them."""
    if any(type(x) is not np.ndarray for x in arrays) or not all(map(_is_plain, arrays)):
        return None
    return _prepare(operation, group, codec, arrays, list(arrays), root)


def _prepare(
    operation: str, group: Group, codec: str, arrays: tuple[Array, ...], memory: list[Any], root: int | None
) -> ReadyCall | None:
    counts = [_count(x) for x in arrays]
    n = counts[-1] if operation == "allgather" else counts[0]
    if not _is_native(operation, n, group, codec) or not _fit(operation, n, counts, group):
        return None
    if len(arrays) == 2 and _share_memory(*arrays):
        return None  # whether that is right is for operations.py to say
    if root is not None and not 0 <= root < group.size:
        return None
    name, size_bytes = NAMES[operation], n * FLOAT32.itemsize
    before = [MPI.IN_PLACE] if operation == "allreduce" else []
    after = [counts_of(n, group.size)[0]] if operation == "reduce_scatter" else [] if root is None else [root]
    call = partial(getattr(group.comm, name), *before, *memory, *after)
    n_out = counts[1] if len(counts) == 2 else 0
    return ReadyCall(call, counts[0], n_out, size_bytes, lambda: library_words(name, size_bytes, group))


def _new_out(operation: str, x: Array, group: Group, codec: str) -> Array | None:
    """A new array for the result, if the call for x is the library's."""
    if not _is_plain(x):
        return None
    n = _count(x) * (group.size if operation == "allgather" else 1)
    if not _is_native(operation, n, group, codec):
        return None
    if operation == "allgather":
        shape = x.shape or (1,)
        return new_like(x, (group.size * shape[0], *shape[1:]))
    return new_like(x, x.shape if operation == "alltoall" else (counts_of(n, group.size)[0][group.rank],))


def _is_native(operation: str, n: int, group: Group, codec: str) -> bool:
    """Say whether `auto` took the library for n values before, without a codec, and one message can carry them."""
    plan = group.plans.get((operation, n, codec, FLOAT32, "cpu"))
    if plan is None or plan.algorithm != "native" or plan.codec.name != "raw":
        return False
    return 0 < n * FLOAT32.itemsize <= LARGEST_MESSAGE_BYTES


def _fit(operation: str, n: int, counts: list[int], group: Group) -> bool:
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
