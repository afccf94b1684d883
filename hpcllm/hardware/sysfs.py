"""The kernel's small files: one value each, and any of them may be missing.

    /sys/devices/system/cpu/cpu0/topology/core_id     "0\n"
    /sys/devices/system/node/node0/cpulist            "0-15,64-79\n"
    /sys/class/net/hsn0/device                        -> ../../../0000:c5:00.0

A container or an old kernel lacks some of them, so nothing here raises: what cannot be read is "", None or ().
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcllm.hardware.lists import numbers


@dataclass(frozen=True)
class Root:
    """Where /sys, /proc and /dev are: the machine's, or a folder like it. Names come without the first slash."""

    path: Path = Path("/")

    def text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int | None:
        """A whole number, in decimal or as 0x..; None for anything else."""
        try:
            return int(self.text(name), 0)
        except ValueError:
            return None

    def numbers(self, name: str) -> tuple[int, ...]:
        """Of a list such as "0-15,64-79"."""
        return numbers(self.text(name))

    def names(self, folder: str) -> list[str]:
        """What is in a folder, cpu2 before cpu10."""
        try:
            return sorted(os.listdir(self.path / folder), key=_natural)
        except OSError:
            return []

    def target(self, link: str) -> str:
        """The last part of where a symbolic link leads: of `device` the PCI address. "" if there is no such link."""
        path = self.path / link
        return os.path.basename(os.path.realpath(path)) if path.is_symlink() else ""


MACHINE = Root()


def _natural(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))
