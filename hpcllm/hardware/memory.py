"""Memory of a node, and what this process may have of it.

node  MemTotal >= cgroup: what the batch system or a container allows >= MemAvailable: what is left now
/dev/shm  where ranks of a node share memory: a file system of its own size, 64 MiB in many containers
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpcllm.hardware.cgroup import memory_limit
from hpcllm.hardware.sysfs import MACHINE, Root

GIB = 1 << 30
FEW_GIB = 8


@dataclass(frozen=True)
class Memory:
    """Bytes; does not change while a job runs."""

    total_bytes: int
    limit_bytes: int  # what this process's cgroup allows, at most total_bytes
    huge_page_bytes: int  # size of those that are set aside, 0 if none are
    shared_bytes: int  # size of /dev/shm; 0: there is none

    @property
    def usable_bytes(self) -> int:
        return min(self.total_bytes, self.limit_bytes)

    def rounded(self) -> Memory:
        """Large sizes in whole GiB: of nodes that are alike the kernel keeps some MB more or less for itself."""
        sizes = (self.total_bytes, self.limit_bytes, self.shared_bytes)
        total, limit, shared = (size if size < FEW_GIB * GIB else round(size / GIB) * GIB for size in sizes)
        return Memory(total, limit, self.huge_page_bytes, shared)


@dataclass(frozen=True)
class Room:
    """Bytes that are free now."""

    available_bytes: int
    shared_bytes: int


def find_memory(root: Root = MACHINE) -> Memory:
    lines = _meminfo(root)
    total = lines.get("MemTotal", 0)
    huge = lines.get("Hugepagesize", 0) if lines.get("HugePages_Total", 0) else 0
    return Memory(total, min(memory_limit(root), total), huge, _file_system(root)[0])


def find_room(root: Root = MACHINE) -> Room:
    return Room(_meminfo(root).get("MemAvailable", 0), _file_system(root)[1])


def _meminfo(root: Root) -> dict[str, int]:
    """Name -> bytes, or a count where the kernel gives no unit."""
    found = {}
    for line in root.text("proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _file_system(root: Root) -> tuple[int, int]:
    """Size and free bytes of /dev/shm; zeros if there is none."""
    try:
        status = os.statvfs(root.path / "dev/shm")
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
