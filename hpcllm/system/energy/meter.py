"""Joules of a node since training began, from counters that may begin anew or vanish.

    counter | . - ' | wraps |  . - '         gained: new - old, or with the range where it has wrapped;
            +-------+-------+---------> s    a counter without a range that falls was reset: gained nothing

Read on request. A thread reads besides where a source needs that, see Source.tick_s: watts must be looked at
while they last, and a counter that wraps twice unseen is lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcllm.system.energy.sources import Source


class Joules(NamedTuple):
    """Energy since the meter was opened."""

    total: float
    devices: float  # the part of it that GPUs drew, as far as the source knows


@dataclass
class Meter:
    """Meter of one node. `lost` says why the source is no longer read, once it is not."""

    source: Source
    lost: str = ""
    _gained_j: list[float] = field(default_factory=list)
    _last_j: list[float] = field(default_factory=list)
    _read_s: float = -math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.joules()

    def joules(self, last: bool = False) -> Joules:
        """Return the energy so far, constant once the source is lost. last: read it, however recent that was."""
        with self._lock:
            if not self.lost and (last or time.monotonic() - self._read_s >= self.source.fresh_s):
                self._update()
        return Joules(*(sum(self._gained_j[k] for k in part) for part in (self.source.counted, self.source.of_devices)))

    def _update(self) -> None:
        try:
            now = list(self.source.read())
        except (OSError, ValueError) as error:
            self.lost = str(error) or type(error).__name__
            self._gained_j = self._gained_j or [0.0] * (1 + max(self.source.counted + self.source.of_devices))
            return
        before = self._last_j or now
        gained = self._gained_j or [0.0] * len(now)
        self._gained_j = [total + self._rise(k, before[k], now[k]) for k, total in enumerate(gained)]
        self._last_j, self._read_s = now, time.monotonic()

    def _rise(self, counter: int, before: float, now: float) -> float:
        if now >= before:
            return now - before
        range_j = self.source.range_j(counter)
        return now - before + range_j if math.isfinite(range_j) else 0.0


@contextmanager
def metering(source: Source) -> Iterator[Meter]:
    """Open a Meter, with its thread if the source needs one."""
    meter, stop = Meter(source), threading.Event()
    if source.tick_s is None:
        yield meter
        return

    def tick(every_s: float) -> None:
        while not stop.wait(every_s):
            meter.joules()

    thread = threading.Thread(target=tick, args=(source.tick_s,), name="hpcllm energy", daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()
