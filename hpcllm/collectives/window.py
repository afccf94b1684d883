"""Arrays in memory that the ranks of a node share, so that they are summed where they are.

    node's window, one MPI allocation, mapped by all of its ranks, pages zeroed (and so placed) by their owner

       rank 0's array        rank 1's array        rank 2's array
    [ ........[####].. ]  [ ........[####].. ]  [ ........[####].. ]
              same place in the array on every rank: any view will do

A window belongs to one Group: a view of it is summed in place by collectives of that Group and is ordinary memory to
all others. Its ranks compare places before each sum, so a view at another place costs time, never a wrong sum.
"""

from __future__ import annotations

import bisect
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives.group import Group, group_of
from hpcllm.errors import HpcllmError, UserError
from hpcllm.together import raise_together

PAGE_BYTES = 4096
MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Window:
    number: int  # counted from 1, the same on all ranks of the node
    handle: MPI.Win
    memory: NDArray[np.uint8]  # this rank's part
    addresses: NDArray[np.uint64]  # (node ranks,) of all parts, as this process sees them

    @property
    def start(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass
class Windows:
    """What one Group has allocated, ordered by address."""

    made: int = 0
    starts: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def find(self, address: int, size_bytes: int) -> tuple[Window | None, int]:
        """The window that holds these bytes of this rank's own part, and their offset in it; (None, 0) if none does."""
        place = bisect.bisect_right(self.starts, address) - 1
        if place < 0:
            return None, 0
        window, offset = self.windows[place], address - self.starts[place]
        return (window, offset) if offset + size_bytes <= window.memory.size else (None, 0)

    def add(self, window: Window) -> None:
        place = bisect.bisect(self.starts, window.start)
        self.starts.insert(place, window.start)
        self.windows.insert(place, window)

    def remove(self, window: Window) -> None:
        place = self.starts.index(window.start)
        del self.starts[place], self.windows[place]


def shared_zeros(n: int, comm: MPI.Intracomm | Group, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(n,) zeros in this rank's part of a new window of its node. Collective over comm, same n on all ranks.

    Lives until free_shared, or until comm is freed: after that no view of it may be touched.
    Raises UserError on all ranks if a node has too little shared memory.
    """
    window = allocate_window(n * dtype.itemsize, group_of(comm))
    return torch.frombuffer(window.memory, dtype=dtype, count=n) if n else torch.empty(0, dtype=dtype)


def free_shared(x: torch.Tensor, comm: MPI.Intracomm | Group) -> None:
    """Give back the window that holds x, made by shared_zeros over comm. Collective over comm. Raises ValueError."""
    windows = windows_of(group_of(comm))
    window, _ = windows.find(x.data_ptr(), max(x.nbytes, 1))
    if window is None:
        raise ValueError(f"no shared array of this communicator holds a tensor of shape {tuple(x.shape)}, {x.dtype}")
    windows.remove(window)
    window.handle.Free()


def windows_of(group: Group) -> Windows:
    """What `group` has allocated so far; given back when the group is freed."""
    kept: Any = group.node.Get_attr(_KEY)
    windows: Windows = kept or Windows()
    if not kept:
        group.node.Set_attr(_KEY, windows)
        group.at_free.append(lambda: _free_all(windows))
    return windows


def allocate_window(size_bytes: int, group: Group) -> Window:
    """A zeroed window of that many bytes for each rank of the node. Collective over group. Raises UserError."""
    windows = windows_of(group)
    size_bytes = max(-(-size_bytes // PAGE_BYTES), 1) * PAGE_BYTES
    raise_together(group.comm, _shortage(size_bytes, group))
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each part starts on a page of its own
    handle = MPI.Win.Allocate_shared(size_bytes, 1, info, group.node)
    info.Free()
    parts = [_part(handle, rank) for rank in range(group.node.size)]
    addresses = np.array([part.ctypes.data for part in parts], dtype=np.uint64)
    window = Window(windows.made + 1, handle, parts[group.node.rank], addresses)
    try:
        raise_together(group.comm, _zero(window.memory, group))
    except HpcllmError:
        handle.Free()
        raise
    windows.made += 1
    windows.add(window)
    return window


def _part(handle: MPI.Win, rank: int) -> NDArray[np.uint8]:
    memory: Any = handle.Shared_query(rank)[0]
    return np.frombuffer(memory, dtype=np.uint8)


def _shortage(size_bytes: int, group: Group) -> UserError | None:
    """What the node's first rank has against it: Open MPI fails on one rank only, and the others wait for ever."""
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


def _free_all(windows: Windows) -> None:
    while windows.windows:
        window = min(windows.windows, key=lambda w: w.number)  # in the same order on all ranks
        windows.remove(window)
        window.handle.Free()


_KEY = MPI.Comm.Create_keyval()
