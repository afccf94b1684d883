"""`native`: the MPI library's own collectives, the baseline.

Uncompressed only: MPI can neither add up our codes nor tell how long they are. Sums are of fp32 only, because MPI has
no portable 16-bit floats; data movement is of any dtype.

    waits without a limit     MPI's blocking call, the faster one; library_calls.py makes the same at once
    with one                  the nonblocking call, polled; of little the blocking one where nothing else computes
    chunks of one length      the call without counts, which libraries do better; but for reduce_scatter, which Open MPI
                              without counts makes of a reduce and a scatter

Arrays on a device: a GPU-aware library moves them where they are. For all others, and for every sum, which libraries
make on the host anyway, the whole array goes through pinned memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.arrays import overlap
from hpcllm.collectives.group import Group
from hpcllm.collectives.selection import LARGEST_COUNT
from hpcllm.mpi.buffers import LARGEST_MESSAGE_BYTES, as_buffer
from hpcllm.mpi.message_memory import DeviceMemory
from hpcllm.mpi.partition import chunk_range
from hpcllm.mpi.wait import name_members

UNITS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.FLOAT, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}  # moved, never added


def native_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) float32 over the group in place. Collective. Raises ValueError on another dtype or codec."""
    _check_sum(codec)
    on_host = _on_host("sum", x, group)
    memory, step = on_host.numpy(), LARGEST_MESSAGE_BYTES // x.element_size()
    for start in range(0, memory.size, step):
        _call(group, "Allreduce", x.nbytes, MPI.IN_PLACE, memory[start : start + step])
    _bring_back(on_host, x)


def native_reduce_scatter(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) float32 -> out: this rank's chunk of the sum, or that chunk of x itself. Collective.

    Raises ValueError on another dtype or codec.
    """
    _check_sum(codec)
    _check_count(x.numel())
    addends, total = _on_host("addends", x, group), _on_host("sum", out, group, filled=False)
    if overlap(addends, total):  # MPI takes no memory twice
        total = group.wire.memory.workspace("sum", out.numel(), out.dtype)
    counts = counts_of(x.numel(), group.size)[0]
    _call(group, "Reduce_scatter", x.nbytes, addends.numpy(), total.numpy(), counts)
    _bring_back(total, out)


def native_allgather(part: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """part (own chunk,), which may be out's own chunk -> out (n,). Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    _check_count(out.numel())
    start, end = chunk_range(out.numel(), group.size, group.rank)
    in_place = part.data_ptr() == out[start:].data_ptr()
    everything = _for_library("everything", out, group, filled=False)
    if everything is not out:
        everything[start:end].copy_(part)
        in_place = True
    sent = MPI.IN_PLACE if in_place else _units(_for_library("part", part, group))
    if out.numel() % group.size == 0:
        _call(group, "Allgather", out.nbytes, sent, _units(everything))
    else:
        _call(group, "Allgatherv", out.nbytes, sent, _units(everything, counts_of(out.numel(), group.size)))
    _bring_back(everything, out)


def native_alltoall(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """Block r of x (n,), n a multiple of the ranks, goes to rank r. Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    _check_count(x.numel())
    leaving, coming = _for_library("leaving", x, group), _for_library("coming", out, group, filled=False)
    _call(group, "Alltoall", x.nbytes, _units(leaving), _units(coming))
    _bring_back(coming, out)


def native_broadcast(x: torch.Tensor, root: int, group: Group, codec: Codec) -> None:
    """root's x (n,) goes to every rank. Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    step = LARGEST_MESSAGE_BYTES // x.element_size()
    everything = _for_library("everything", x, group, filled=group.rank == root)
    for start in range(0, x.numel(), step):
        _call(group, "Bcast", x.nbytes, _units(everything[start : start + step]), root)
    if group.rank != root:
        _bring_back(everything, x)


def _for_library(name: str, x: torch.Tensor, group: Group, *, filled: bool = True) -> torch.Tensor:
    """Return x if the library may read and fill its memory, else host memory, filled with x's values or not."""
    memory = group.wire.memory
    if not isinstance(memory, DeviceMemory) or not memory.direct:
        return _on_host(name, x, group, filled=filled)
    memory.before_receive(x)
    return x


def _on_host(name: str, x: torch.Tensor, group: Group, *, filled: bool = True) -> torch.Tensor:
    """Return x if it is on the CPU, else pinned memory, filled with its values or not."""
    memory = group.wire.memory
    if not isinstance(memory, DeviceMemory):
        return x
    host = memory.pinned(name, x.nbytes).view(x.dtype)
    if filled:
        return memory.settle(lambda: host.copy_(x))
    memory.before_receive(host)  # the last call's result may still be on its way from there
    return host


def _bring_back(values: torch.Tensor, x: torch.Tensor) -> None:
    """Copy to x what was received or summed elsewhere; the host does not wait, see _on_host."""
    if values is not x:
        x.copy_(values, non_blocking=True)


def _call(group: Group, name: str, size_bytes: int, *arguments: Any) -> None:
    """Make a collective call of the library by its name: the blocking one, or its twin that is polled.

    size_bytes: of the whole array, on every rank, as selection.py counts it.
    """
    waits = group.wire.waits
    if waits.may_block(size_bytes):
        waits.block(lambda: library_words(name, size_bytes, group), getattr(group.comm, name), *arguments)
        return
    request = getattr(group.comm, f"I{name.lower()}")(*arguments)
    waits.all([request], lambda: library_words(name, size_bytes, group))


def library_words(name: str, size_bytes: int, group: Group) -> str:
    """Name a call of the library where it is waited for; the same words on every rank."""
    return f"the library's {name.lower()} of {size_bytes} bytes, {name_members(group.comm)}"


@lru_cache(maxsize=64)
def counts_of(n: int, ranks: int) -> tuple[list[int], list[int]]:
    """Lengths and starts of all chunks."""
    ranges = [chunk_range(n, ranks, rank) for rank in range(ranks)]
    return [end - start for start, end in ranges], [start for start, _ in ranges]


def _check_count(n: int) -> None:
    if n > LARGEST_COUNT:
        raise ValueError(f"native takes at most {LARGEST_COUNT} values at once, not {n}; valid: another algorithm")


def _units(x: torch.Tensor, counts: Any = None) -> Any:
    """An MPI buffer of x's values as opaque units of their size."""
    memory, unit = as_buffer(x), UNITS[x.element_size()]
    return [memory, counts, unit] if counts else [memory, unit]


def _check_raw(codec: Codec) -> None:
    if codec.name != "raw":
        raise ValueError(f"native sends raw values only; codec {codec.name} needs another algorithm")


def _check_sum(codec: Codec) -> None:
    _check_raw(codec)
    if codec.dtype != torch.float32:
        raise ValueError(f"native sums float32 only, MPI has no {codec.dtype}; valid: another algorithm")
