"""A node as one value, equal on nodes that are alike: its memory, what limits this process, and all of its hardware.

node  MemTotal >= cgroup: what the batch system or a container allows >= MemAvailable: what is left now
/dev/shm  where ranks of a node share memory: a file system of its own size, 64 MiB in many containers

Batch systems and containers limit memory and time by the kernel's control groups; a group is limited by those above it,
too. Source: Documentation/admin-guide/cgroup-v{1,2} of the Linux kernel.

    /proc/self/cgroup   0::/job_7/step_0   ->  /sys/fs/cgroup/job_7/step_0/{memory.max, cpu.max}       version 2
                        4:memory:/job_7    ->  /sys/fs/cgroup/memory/job_7/memory.limit_in_bytes       version 1
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hpcllm.system.hardware.pci_devices import Gpu, Nic, find_gpus, find_nics
from hpcllm.system.hardware.sysfs import MACHINE, Root
from hpcllm.system.hardware.topology import Topology, find_topology

GIB = 1 << 30
FEW_GIB = 8
_UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" as a number near 2^63
# dtype -> words of /proc/cpuinfo, any of which says that the cores multiply it: x86-64, then Arm (hwcaps of Linux)
_MULTIPLIES = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


@dataclass(frozen=True)
class Memory:
    """Memory of a node in bytes; does not change while a job runs."""

    total_bytes: int
    limit_bytes: int  # what this process's cgroup allows, at most total_bytes
    huge_page_bytes: int  # size of those that are set aside, 0 if none are
    shared_bytes: int  # size of /dev/shm; 0: there is none

    @property
    def usable_bytes(self) -> int:
        return min(self.total_bytes, self.limit_bytes)

    def rounded(self) -> Memory:
        """Round large sizes to GiB: of nodes that are alike the kernel keeps some MB more or less for itself."""
        sizes = (self.total_bytes, self.limit_bytes, self.shared_bytes)
        total, limit, shared = (size if size < FEW_GIB * GIB else round(size / GIB) * GIB for size in sizes)
        return Memory(total, limit, self.huge_page_bytes, shared)


@dataclass(frozen=True)
class FreeMemory:
    """Free memory in bytes, now."""

    available_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Hardware:
    processor: str  # 'AMD EPYC 7A53 64-Core Processor'
    topology: Topology
    memory: Memory
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    quota_cores: float | None = None  # number of cores whose time a container may take; None: no limit


def find_hardware(root: Root = MACHINE) -> Hardware:
    """Read the hardware of this node; takes some milliseconds, so one rank of a node does it."""
    return Hardware(
        _processor(root), find_topology(root), find_memory(root), find_gpus(root), find_nics(root), cpu_quota(root)
    )


def node_name() -> str:
    """Return the host's name up to the first dot, as batch systems know nodes."""
    return socket.gethostname().partition(".")[0]


def allowed_cores() -> tuple[int, ...]:
    """Return the hardware threads that this process may run on; all where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def multiplies(dtype: str, root: Root = MACHINE) -> bool:
    """Say whether the cores have instructions that multiply fp32, bf16 or fp16; True where the system does not tell."""
    lines = (line.partition(":") for line in root.text("proc/cpuinfo").splitlines())
    words = next((value.split() for name, _, value in lines if name.strip() in ("flags", "Features")), None)
    return words is None or dtype not in _MULTIPLIES or not _MULTIPLIES[dtype].isdisjoint(words)


def busy_s(cores: Collection[int], root: Root = MACHINE) -> float:
    """Return the seconds that these hardware threads have worked since the node was started, all together."""
    named = {f"cpu{core}" for core in cores}
    rows = (line.split() for line in root.text("proc/stat").splitlines())
    return sum(_worked(row[1:]) for row in rows if row and row[0] in named) / os.sysconf("SC_CLK_TCK")


def find_memory(root: Root = MACHINE) -> Memory:
    lines = _meminfo(root)
    total = lines.get("MemTotal", 0)
    huge = lines.get("Hugepagesize", 0) if lines.get("HugePages_Total", 0) else 0
    return Memory(total, min(memory_limit(root), total), huge, _file_system(root)[0])


def find_free_memory(root: Root = MACHINE) -> FreeMemory:
    return FreeMemory(_meminfo(root).get("MemAvailable", 0), _file_system(root)[1])


def memory_limit(root: Root = MACHINE) -> int:
    """Return the bytes that this process's groups may use; more than any memory where there is no limit."""
    files = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = (root.number(f"{folder}/{files[kind]}") for kind, folder in _folders(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=_UNLIMITED_BYTES)


def cpu_quota(root: Root = MACHINE) -> float | None:
    """Return the number of cores whose time this process's groups may take; None where there is no limit."""
    found = []
    for kind, folder in _folders(root, "cpu"):
        if kind:
            words = [root.text(f"{folder}/cpu.cfs_{what}_us") for what in ("quota", "period")]
        else:
            words = root.text(f"{folder}/cpu.max").split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _worked(words: list[str]) -> int:
    """Sum the ticks that were not idle, from user to steal; time of guests is in that of users."""
    ticks = [int(word) for word in words[:8]]
    return sum(ticks) - sum(ticks[3:5])


def _processor(root: Root) -> str:
    for line in root.text("proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu model", "CPU part"):
            return value.strip()
    return os.uname().machine


def _meminfo(root: Root) -> dict[str, int]:
    """Return name -> bytes, or a count where the kernel gives no unit."""
    found = {}
    for line in root.text("proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _file_system(root: Root) -> tuple[int, int]:
    """Return size and free bytes of /dev/shm; zeros if there is none."""
    try:
        status = os.statvfs(root.path / "dev/shm")
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _folders(root: Root, controller: str) -> Iterator[tuple[str, str]]:
    """Yield ("" for version 2 or the controller, folder) of this process's groups, the outermost first."""
    for line in root.text("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and controller not in kinds.split(","):
            continue
        base = "sys/fs/cgroup" + (f"/{controller}" if kinds else "")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield (controller if kinds else ""), "/".join([base, *parts[:depth]])
