"""A node as one value, equal on nodes that are alike."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from dataclasses import dataclass

from hpcllm.hardware.cgroup import cpu_quota
from hpcllm.hardware.devices import Gpu, find_gpus
from hpcllm.hardware.memory import Memory, find_memory
from hpcllm.hardware.network import Nic, find_nics
from hpcllm.hardware.sysfs import MACHINE, Root
from hpcllm.hardware.topology import Topology, find_topology


@dataclass(frozen=True)
class Hardware:
    processor: str  # 'AMD EPYC 7A53 64-Core Processor'
    topology: Topology
    memory: Memory
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    quota_cores: float | None = None  # of whose time a container may take so much; None: no limit


def find_hardware(root: Root = MACHINE) -> Hardware:
    """Of this node; some milliseconds, so one rank of a node looks."""
    return Hardware(
        _processor(root), find_topology(root), find_memory(root), find_gpus(root), find_nics(root), cpu_quota(root)
    )


def node_name() -> str:
    """The host's name up to the first dot, as batch systems know nodes."""
    return socket.gethostname().partition(".")[0]


def allowed_cores() -> tuple[int, ...]:
    """Hardware threads that this process may run on; all where the system has no such thing."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def busy_s(cores: Collection[int], root: Root = MACHINE) -> float:
    """Seconds that these hardware threads have worked since the node was started, all together."""
    named = {f"cpu{core}" for core in cores}
    rows = (line.split() for line in root.text("proc/stat").splitlines())
    return sum(_worked(row[1:]) for row in rows if row and row[0] in named) / os.sysconf("SC_CLK_TCK")


def _worked(words: list[str]) -> int:
    """Ticks that were not idle, from user to steal: time of guests is in that of users."""
    ticks = [int(word) for word in words[:8]]
    return sum(ticks) - sum(ticks[3:5])


def _processor(root: Root) -> str:
    for line in root.text("proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "cpu model", "CPU part"):
            return value.strip()
    return os.uname().machine
