"""Joules of a node since training began, from counters that may begin anew or vanish.

    counter | . - ' | wraps |  . - '         gained: new - old, or with the range where it has wrapped;
            +-------+-------+---------> s    a counter without a range that falls was reset: gained nothing

Read when it is asked for. A thread reads besides where a source needs that, see Source.tick_s: watts must be looked at
while they last, and a counter that wraps twice unseen is lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from hpcllm.energy import cray, hwmon, nvml, rapl
from hpcllm.energy.source import MissingSourceError, Source


class Finder(Protocol):
    def __call__(self, sysfs: Path, /) -> Source:
        """Raises MissingSourceError."""


FINDERS: Mapping[str, Finder] = {
    "pm_counters": cray.find,
    "nvml": nvml.find,
    "hwmon": hwmon.find,
    "rapl": rapl.find,
}
OF_GPUS = ("nvml", "hwmon")  # tell nothing of a run that computes on CPUs


class Joules(NamedTuple):
    """Since the meter was opened."""

    total: float
    devices: float  # the part of it that GPUs took, as far as the source knows


@dataclass
class Meter:
    """One node's. `lost` says why the source is no longer read, once it is not."""

    source: Source
    lost: str = ""
    _gained_j: list[float] = field(default_factory=list)
    _last_j: list[float] = field(default_factory=list)
    _read_s: float = -math.inf
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.joules()

    def joules(self, last: bool = False) -> Joules:
        """So far; from then on the same once the source is lost. last: read it, however short ago that was done."""
        with self._lock:
            if not self.lost and (last or time.monotonic() - self._read_s >= self.source.fresh_s):
                self._look()
        return Joules(*(sum(self._gained_j[k] for k in part) for part in (self.source.counted, self.source.of_devices)))

    def _look(self) -> None:
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


def find_source(wanted: str, sysfs: Path, on_gpus: bool) -> Source:
    """The source of that name; of "auto" the first that this node has. Raises MissingSourceError with all reasons."""
    found = []
    for name, find in FINDERS.items():
        if name == wanted or (wanted == "auto" and (on_gpus or name not in OF_GPUS)):
            try:
                return find(sysfs)
            except MissingSourceError as error:
                found.append((name, error))
    there = [(name, error) for name, error in found if error.is_there]
    raise MissingSourceError("; ".join(f"{name}: {error}" for name, error in there or found), bool(there))


@contextmanager
def metering(source: Source) -> Iterator[Meter]:
    """A Meter, with its thread if the source needs one."""
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
