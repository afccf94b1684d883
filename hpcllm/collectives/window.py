"""Arrays in memory that the ranks of a node share, so that they are summed where they are.

    node's window, one MPI allocation, mapped by all of its ranks, pages zeroed (and so placed) by their owner

       rank 0's array        rank 1's array        rank 2's array
    [ ........[####].. ]  [ ........[####].. ]  [ ........[####].. ]
              same place in the array on every rank: any view will do

Collectives over the same ranks of the node sum a view of it in place; to all others it is ordinary memory. The ranks
compare places before each sum, so a view at another place costs time, never a wrong sum.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives.group import Group, group_of
from hpcllm.errors import HpcllmError, UserError
from hpcllm.mpi.collective_errors import raise_if_any_failed
from hpcllm.mpi.message_memory import ALIGNMENT_BYTES

PAGE_BYTES = 4096
MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Window:
    """One MPI window of the ranks of a node."""

    number: int  # no other window that a rank of the node shares has it; the same on all of them
    node: MPI.Intracomm
    handle: MPI.Win
    memory: NDArray[np.uint8]  # this rank's part
    addresses: NDArray[np.uint64]  # (node ranks,) of all parts, as this process sees them

    @property
    def start(self) -> int:
        return int(self.memory.ctypes.data)

    def free(self) -> None:
        """Give the window back. Collective over the node."""
        with _change:
            _set_known([window for window in _known[1] if window is not self])
        self.handle.Free()


def find_window(address: int, size_bytes: int) -> tuple[Window | None, int]:
    """The window whose own part holds these bytes, and their offset in it; (None, 0) if none does."""
    starts, windows = _known
    place = bisect.bisect_right(starts, address) - 1
    if place < 0:
        return None, 0
    window, offset = windows[place], address - starts[place]
    return (window, offset) if offset + size_bytes <= window.memory.size else (None, 0)


def shared_zeros(
    shape: int | Sequence[int], comm: MPI.Intracomm | Group, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Zeros in this rank's part of a new window of its node. Collective over comm, same shape and dtype on all ranks.

    Lives until free_shared, or until comm is freed: after that no view of it may be touched. x.numpy() is a view.
    Raises UserError on all ranks if a node has too little shared memory.
    """
    group, sizes = group_of(comm), (shape,) if isinstance(shape, int) else tuple(shape)
    n = math.prod(sizes)
    window = allocate_window(n * dtype.itemsize, group)
    _count(group, 1)
    return torch.frombuffer(window.memory, dtype=dtype, count=n).view(sizes) if n else torch.empty(sizes, dtype=dtype)


def free_shared(x: torch.Tensor, comm: MPI.Intracomm | Group) -> None:
    """Give back the window that holds x, made by shared_zeros over comm. Collective over comm. Raises ValueError."""
    group = group_of(comm)
    window, _ = find_window(x.data_ptr(), max(x.nbytes, 1))
    if window is None or window.node is not group.node:
        raise ValueError(f"no shared array of this communicator holds the tensor of shape {tuple(x.shape)}, {x.dtype}")
    group.at_free.remove(window.free)
    window.free()
    _count(group, -1)


def _count(group: Group, change: int) -> None:
    """Note an array more or less; `auto` chooses anew where there is one at last, or none any more."""
    had, group.shared_arrays = group.shared_arrays > 0, group.shared_arrays + change
    if had != (group.shared_arrays > 0):
        group.choose_anew()


def allocate_window(size_bytes: int, group: Group) -> Window:
    """A zeroed window of that many bytes for each rank of the node. Collective over group. Raises UserError."""
    size_bytes = max(-(-size_bytes // PAGE_BYTES), 1) * PAGE_BYTES
    raise_if_any_failed(group.comm, _shortage(size_bytes, group))
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each part starts on a page of its own
    handle = MPI.Win.Allocate_shared(size_bytes + ALIGNMENT_BYTES, 1, info, group.node)
    info.Free()
    parts = [_part(handle, rank, size_bytes) for rank in range(group.node.size)]
    try:
        raise_if_any_failed(group.comm, _zero(parts[group.node.rank], group))
    except HpcllmError:
        handle.Free()
        raise
    addresses = np.array([part.ctypes.data for part in parts], dtype=np.uint64)
    # the next number of the node's first rank, made its own by its rank in the job
    number = np.array([next(_numbers) << 32 | MPI.COMM_WORLD.rank])
    group.node.Bcast(number)
    window = Window(int(number[0]), group.node, handle, parts[group.node.rank], addresses)
    with _change:
        _set_known([*_known[1], window])
    group.at_free.append(window.free)
    return window


def _part(handle: MPI.Win, rank: int, size_bytes: int) -> NDArray[np.uint8]:
    """A rank's part, cut to the alignment: the window of a rank that is alone has none."""
    memory: Any = handle.Shared_query(rank)[0]
    part = np.frombuffer(memory, dtype=np.uint8)
    return part[-part.ctypes.data % ALIGNMENT_BYTES :][:size_bytes]


def _shortage(size_bytes: int, group: Group) -> UserError | None:
    """Check free memory on the node's first rank: Open MPI would fail on one rank alone, the others wait for ever."""
    folder = os.environ.get("OMPI_MCA_osc_sm_backing_directory", "/dev/shm")  # noqa: SIM112 -- Open MPI's name
    if group.node.rank > 0 or not os.path.isdir(folder):
        return None
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    fits = size_bytes * group.node.size + PAGE_BYTES * (group.node.size + 1) <= free_bytes
    return None if fits else _too_small(size_bytes, group, f"{folder} has {free_bytes / MIB:.1f} MiB free")


def _zero(memory: NDArray[np.uint8], group: Group) -> UserError | None:
    """Fill through the kernel: where a store into a full file system would end the process, a read stops short."""
    done = 0
    with open("/dev/zero", "rb", buffering=0) as zeros:
        while done < memory.size:
            try:
                count = zeros.readinto(memory[done:].data)
            except OSError:
                count = 0
            if not count:
                return _too_small(memory.size, group, f"memory ended after {done / MIB:.1f} MiB of a rank")
            done += count
    return None


def _too_small(size_bytes: int, group: Group, found: str) -> UserError:
    return UserError(
        f"{group.node.size} ranks of node {socket.gethostname()} ask for {size_bytes / MIB:.1f} MiB of shared memory "
        f"each, but {found}; enlarge /dev/shm (container: --shm-size, host: mount -o remount,size=...), "
        "use smaller arrays, or an algorithm other than node_window and two_level"
    )


def _set_known(windows: list[Window]) -> None:
    """Replace the list as a whole: lanes that look meanwhile see the one state or the other."""
    global _known
    ordered = sorted(windows, key=lambda window: window.start)
    _known = [window.start for window in ordered], ordered


_known: tuple[list[int], list[Window]] = ([], [])  # this process's windows by the address of this rank's part
_change = threading.Lock()
_numbers = itertools.count(1)
