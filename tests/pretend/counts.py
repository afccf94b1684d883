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


@dataclass(eq=False)
class Counts:
    """Counts of an interval, whole when it is over."""

    operators: dict[str, int] = field(default_factory=dict)  # launches, by name
    moved_bytes: int = 0  # of all tensors that operators were handed, or made
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


_open: list[Counts] = []  # intervals that are not over


@contextmanager
def counting() -> Iterator[Counts]:
    """Count until the end of the block, perhaps within another one, which counts the same."""
    counts = Counts()
    _share_out()
    _open.append(counts)
    try:
        yield counts
    finally:
        _share_out()
        _open.remove(counts)
        counts.blocks.sort(key=lambda block: -block.longest)


@contextmanager
def none_denied() -> Iterator[None]:
    """Fail at the end of the block if the program has launched what makes the host wait inside CUDA."""
    with counting() as counts:
        yield
    assert not counts.denied(), f"the host would wait inside CUDA: {counts.denied()}"


def _share_out() -> None:
    """Add what was counted since the last call to all open intervals."""
    found = pretend.native().take_counts()
    blocks = [Block(not is_main, *rest) for is_main, *rest in found["blocks"]]
    for counts in _open:
        for name, count in found["operators"].items():
            counts.operators[name] = counts.operators.get(name, 0) + count
        for name in ("moved_bytes", "event_records", "event_waits"):
            setattr(counts, name, getattr(counts, name) + found[name])
        counts.to_device = _sum(counts.to_device, found["to_device"])
        counts.to_host = _sum(counts.to_host, found["to_host"])
        for block in blocks:
            _add(counts.blocks, block)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _add(blocks: list[Block], block: Block) -> None:
    for at, known in enumerate(blocks):
        if (known.in_lane, known.text) == (block.in_lane, block.text):
            times, longest = known.times + block.times, max(known.longest, block.longest)
            blocks[at] = Block(known.in_lane, known.text, times, longest)
            return
    blocks.append(block)
