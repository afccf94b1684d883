"""The kernel's small files: one value each, and any of them may be missing.

    /sys/devices/system/cpu/cpu0/topology/core_id     "0\n"
    /sys/devices/system/node/node0/cpulist            "0-15,64-79\n"
    /sys/class/net/hsn0/device                        -> ../../../0000:c5:00.0

A container or an old kernel lacks some of them, so nothing here raises: what cannot be read is "", None or (). Sets of
cores are lists in the kernel's notation: numbers("0-2,8") -> (0, 1, 2, 8), list_text((0, 1, 2, 8)) -> "0-2,8".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_STRETCH = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class Root:
    """Folder that holds sys, proc and dev: the machine's "/", or one like it. Names come without the first slash."""

    path: Path = Path("/")

    def text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int | None:
        """Read a whole number, in decimal or as 0x..; None for anything else."""
        try:
            return int(self.text(name), 0)
        except ValueError:
            return None

    def numbers(self, name: str) -> tuple[int, ...]:
        """Read a list such as "0-15,64-79"."""
        return numbers(self.text(name))

    def names(self, folder: str) -> list[str]:
        """List a folder, cpu2 before cpu10."""
        try:
            return sorted(os.listdir(self.path / folder), key=_natural)
        except OSError:
            return []

    def target(self, link: str) -> str:
        """Return the last part of a symbolic link's target: of `device` the PCI address; "" if there is none."""
        path = self.path / link
        return os.path.basename(os.path.realpath(path)) if path.is_symlink() else ""


MACHINE = Root()


def _natural(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))


def numbers(text: str) -> tuple[int, ...]:
    """Parse a list in the kernel's notation, in order; () for any other text."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        stretch = _STRETCH.fullmatch(part)
        if not stretch:
            return ()
        found.update(range(int(stretch[1]), int(stretch[2] or stretch[1]) + 1))
    return tuple(sorted(found))


def list_text(cores: Iterable[int]) -> str:
    """Return '0-2,8', as the kernel, taskset and Slurm take it."""
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs(cores))


def mask_text(cores: Iterable[int]) -> str:
    """Return a mask with a bit a core, in hexadecimal, as --cpu-bind=mask_cpu takes it."""
    return hex(sum(1 << core for core in set(cores)))


def runs(values: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of consecutive numbers."""
    first = last = None
    for value in sorted(set(values)):
        if first is None or last is None:
            first = last = value
        elif value == last + 1:
            last = value
        else:
            yield first, last
            first = last = value
    if first is not None and last is not None:
        yield first, last
