"""Bytes that come and go, and how many there are at most.

take 4   take 2   drop 4   take 3          Use(peak=6, net=5)
....     ......   ..       .....
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """What a stretch of work does to the memory in use, from where it starts."""

    peak: int
    net: int


@dataclass
class Ledger:
    now: int = 0
    peak: int = 0

    def take(self, *sizes: int) -> None:
        """Sizes in bytes; of several, the last is taken while all others are still there."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: int) -> None:
        self.now -= sum(sizes)

    def use(self) -> Use:
        return Use(self.peak, self.now)
