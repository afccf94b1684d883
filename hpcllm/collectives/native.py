"""`native`: the MPI library's own collectives, the baseline.

Uncompressed only: MPI can neither add up our codes nor tell how long they are. Sums are of fp32 only, because MPI has
no portable 16-bit floats; data movement is of any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from hpcllm.buffers import LARGEST_MESSAGE_BYTES
from hpcllm.chunks import chunk_range
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.choice import LARGEST_COUNT
from hpcllm.collectives.group import Group

UNITS = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}  # moved, never added


def native_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) float32 over the group in place. Collective. Raises ValueError on another dtype or codec."""
    _check_sum(codec)
    memory = x.numpy()
    if x.nbytes <= LARGEST_MESSAGE_BYTES and group.wire.waits.limit_s is None:
        group.comm.Allreduce(MPI.IN_PLACE, memory)
        return
    step = LARGEST_MESSAGE_BYTES // x.element_size()
    for start in range(0, x.numel(), step):
        piece = memory[start : start + step]
        group.wire.waits.allreduce(group.comm, piece, lambda: f"the library's allreduce over {group.size} ranks")


def native_reduce_scatter(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) float32 -> out: this rank's chunk of the sum. Collective. Raises ValueError on another dtype or codec."""
    _check_sum(codec)
    counts = _counts(x.numel(), group)[0]
    _wait(group, "reduce_scatter", group.comm.Ireduce_scatter(x.numpy(), out.numpy(), counts))


def native_allgather(part: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """part (own chunk,), which may be out's own chunk -> out (n,). Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    in_place = part.data_ptr() == out[chunk_range(out.numel(), group.size, group.rank)[0] :].data_ptr()
    sent = MPI.IN_PLACE if in_place else _units(part)
    _wait(group, "allgather", group.comm.Iallgatherv(sent, _units(out, _counts(out.numel(), group))))


def native_alltoall(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """Block r of x (n,), n a multiple of the ranks, goes to rank r. Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    counts = _counts(x.numel(), group)
    _wait(group, "alltoall", group.comm.Ialltoallv(_units(x, counts), _units(out, counts)))


def native_broadcast(x: torch.Tensor, root: int, group: Group, codec: Codec) -> None:
    """root's x (n,) goes to every rank. Collective. Raises ValueError on another codec."""
    _check_raw(codec)
    step = LARGEST_MESSAGE_BYTES // x.element_size()
    for start in range(0, x.numel(), step):
        _wait(group, "broadcast", group.comm.Ibcast(_units(x[start : start + step]), root))


def _wait(group: Group, operation: str, request: MPI.Request) -> None:
    group.wire.waits.all([request], lambda: f"the library's {operation} over {group.size} ranks")


def _counts(n: int, group: Group) -> tuple[list[int], list[int]]:
    """Lengths and starts of all chunks."""
    if n > LARGEST_COUNT:
        raise ValueError(f"native takes at most {LARGEST_COUNT} values at once, not {n}; valid: another algorithm")
    ranges = [chunk_range(n, group.size, rank) for rank in range(group.size)]
    return [end - start for start, end in ranges], [start for start, _ in ranges]


def _units(x: torch.Tensor, counts: Any = None) -> Any:
    """An MPI buffer of x's values as opaque units of their size."""
    memory, unit = x.view(torch.uint8).numpy(), UNITS[x.element_size()]
    return [memory, counts, unit] if counts else [memory, unit]


def _check_raw(codec: Codec) -> None:
    if codec.name != "raw":
        raise ValueError(f"native sends raw values only; codec {codec.name} needs another algorithm")


def _check_sum(codec: Codec) -> None:
    _check_raw(codec)
    if codec.dtype != torch.float32:
        raise ValueError(f"native sums float32 only, MPI has no {codec.dtype}; valid: another algorithm")
