"""Counts of what a program asks of the pretend device: launches, events, copies, and the times that the host waits.

    with counting() as counts:
        ...
    counts.launches, counts.blocks, ...

A host block is a wait for operations that the host did not know to be over; its length is how many those are, for the
pretend device takes no time. A wait for what is over already blocks nobody, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pretend

READ, THREAD = "a read by the host", "wait for a thread"  # names of blocks, as device.cpp has them
# operators after which CUDA's host reads something back, some of them only with deterministic algorithms, and what to
# take instead: index_select; sorts; _index_put_impl_ with `unsafe`
DENIED = {
    *("nonzero", "masked_select", "unique_dim", "unique_consecutive", "_unique", "_unique2", "repeat_interleave"),
    *("index by a mask", "_index_put_impl_ by a mask", "_index_put_impl_ with a check", "put", "bincount"),
    *("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"),
}


@dataclass(frozen=True)
class Block:
    """A place where the host waits for the device."""

    in_lane: bool  # in the thread of a lane, beside the program
    text: str  # a name, and the lines of Python that led there
    times: int
    longest: int  # operations

    @property
    def name(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def place(self) -> str:
        """Innermost line: "link.py:120 take"."""
        lines = self.text.splitlines()[1:2]
        return lines[0].strip().rpartition("/")[2] if lines else "no line"


@dataclass
class Counts:
    """Counts of an interval, whole when it is over."""

    operators: dict[str, int] = field(default_factory=dict)  # launches, by name
    event_records: int = 0
    event_waits: int = 0  # by streams
    to_device: tuple[int, int] = (0, 0)  # copies from the host, their bytes
    to_host: tuple[int, int] = (0, 0)
    blocks: list[Block] = field(default_factory=list)  # the longest first

    @property
    def launches(self) -> int:
        return sum(self.operators.values())

    def denied(self) -> dict[str, int]:
        """Launches that make the host wait inside CUDA, by name."""
        return {name: count for name, count in self.operators.items() if name in DENIED}

    def waits(self, in_lane: bool = False) -> list[Block]:
        """Places where the program, or a lane, waits for the device itself, not for a thread."""
        return [block for block in self.blocks if block.in_lane == in_lane and block.name != THREAD]

    def times(self, *names: str) -> int:
        """Number of times that the program's thread waits under one of these names."""
        return sum(block.times for block in self.blocks if block.name in names and not block.in_lane)


@contextmanager
def counting() -> Iterator[Counts]:
    """Count until the end of the block; not one within another."""
    native, counts = pretend.native(), Counts()
    native.take_counts()
    yield counts
    found = native.take_counts()
    blocks = [Block(not is_main, *rest) for is_main, *rest in found.pop("blocks")]
    counts.blocks = sorted(blocks, key=lambda block: -block.longest)
    for name, value in found.items():
        setattr(counts, name, value)
