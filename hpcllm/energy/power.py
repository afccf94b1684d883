"""Energy from power: watts that are asked for now and then, added up over time.

watts |      .--.            joules so far = area: between two looks, the mean of both times the time
      |  .--'    '--.
      +--|---|---|---|--> s
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TICK_S = 0.5  # between two looks: sensors average over about as long
FRESH_S = 2 * TICK_S


@dataclass
class Integral:
    """Joules of several sensors since the first look; watts: what each says now. clock: in seconds."""

    watts: Callable[[], Sequence[float]]
    clock: Callable[[], float] = time.monotonic
    _joules: list[float] = field(default_factory=list)
    _last: tuple[float, Sequence[float]] | None = None

    def read(self) -> list[float]:
        """Look once more. Raises what `watts` raises."""
        now_s, watts = self.clock(), self.watts()
        before_s, before = self._last or (now_s, watts)
        joules = self._joules or [0.0] * len(watts)
        gained = [(now_s - before_s) * (old + new) / 2 for old, new in zip(before, watts, strict=True)]
        self._joules = [total + more for total, more in zip(joules, gained, strict=True)]
        self._last = now_s, watts
        return list(self._joules)
