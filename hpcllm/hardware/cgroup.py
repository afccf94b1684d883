"""What the kernel's control groups allow this process: batch systems and containers limit memory and time by them.

    /proc/self/cgroup   0::/job_7/step_0   ->  /sys/fs/cgroup/job_7/step_0/{memory.max, cpu.max}       version 2
                        4:memory:/job_7    ->  /sys/fs/cgroup/memory/job_7/memory.limit_in_bytes       version 1

A group is limited by those above it, too. Source: Documentation/admin-guide/cgroup-v{1,2} of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcllm.hardware.sysfs import MACHINE, Root

_UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" as a number near 2^63


def memory_limit(root: Root = MACHINE) -> int:
    """Bytes that this process's groups may use; more than any memory where there is no limit."""
    files = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = (root.number(f"{folder}/{files[kind]}") for kind, folder in _folders(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=_UNLIMITED_BYTES)


def cpu_quota(root: Root = MACHINE) -> float | None:
    """As many cores' time as this process's groups may take; None where there is no limit."""
    found = []
    for kind, folder in _folders(root, "cpu"):
        if kind:
            words = [root.text(f"{folder}/cpu.cfs_{what}_us") for what in ("quota", "period")]
        else:
            words = root.text(f"{folder}/cpu.max").split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _folders(root: Root, controller: str) -> Iterator[tuple[str, str]]:
    """("" for version 2 or the controller, folder) of this process's groups, the outermost first."""
    for line in root.text("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kinds and controller not in kinds.split(","):
            continue
        base = "sys/fs/cgroup" + (f"/{controller}" if kinds else "")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield (controller if kinds else ""), "/".join([base, *parts[:depth]])
