"""A place where a node tells its energy: what it is called, what it measures, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SCOPES = {  # what is measured, for people
    "pm_counters": "whole nodes",
    "nvml": "GPUs only",
    "hwmon": "GPUs only",
    "rapl": "CPUs only",
}


class MissingSourceError(Exception):
    """This node has no such source, or it cannot be read; the message says why. is_there: the latter."""

    def __init__(self, why: str, is_there: bool = False) -> None:
        super().__init__(why)
        self.is_there = is_there


@dataclass(frozen=True)
class Source:
    """Counters of one node; how they come to a number of joules: meter.py.

    read: joules of each counter, now. Raises OSError or ValueError once that is no longer possible.
    """

    name: str  # as in energy.source
    read: Callable[[], Sequence[float]]
    counted: tuple[int, ...]  # which counters add up to what is measured
    of_devices: tuple[int, ...] = ()  # which ones are the part of it that GPUs took, where that is known
    wraps_at_j: tuple[float, ...] = ()  # where each counter begins anew; (): nowhere
    tick_s: float | None = None  # read at least so often, whatever the training does; None: no need
    fresh_s: float = 0.1  # younger than that, a reading is as good as a new one

    def range_j(self, counter: int) -> float:
        return self.wraps_at_j[counter] if self.wraps_at_j else math.inf


def number_in(path: Path) -> float:
    """The first word of a file of sysfs: '1234 J 1669374958 us' is 1234. Raises OSError, ValueError."""
    words = path.read_text(encoding="ascii", errors="replace").split()
    if not words:
        raise ValueError(f"{path} is empty")
    return float(words[0])
