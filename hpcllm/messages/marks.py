"""Events on pieces of memory: when a device's stream has done what it was told to do there.

memory    0 ....[####].......[########]......   pieces that do not meet; one that is marked again, or next to it
                event         event             and across, takes the younger event for all of it

put       after the stream was told to read or write a piece
settle    before anybody who knows no streams does: returns when the event has passed
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch


class Marks:
    """On memory of one device, or pinned memory that it reads and writes. Not for two threads at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._events: list[torch.Event | None] = []  # None: has passed
        self._spare: list[torch.Event] = []

    def put(self, data: torch.Tensor) -> None:
        """The current stream was told to read or write `data`, contiguous."""
        start, end = span(data)
        if start == end:
            return
        first, last = self._met(start, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._replace(first, last, [start], [end], [self._recorded()])

    def settle(self, data: torch.Tensor) -> None:
        """Return when the stream is done with `data`; where that is not known, with all that it was told so far."""
        start, end = span(data)
        first, last = self._met(start, end)
        for place in range(first, last):
            event = self._events[place]
            if event is not None:
                event.synchronize()
                self._spare.append(event)
                self._events[place] = None
        if first == last and start < end:
            event = self._recorded()
            event.synchronize()
            self._spare.append(event)

    def clear(self) -> None:
        """Nothing is known of any piece."""
        self._replace(0, len(self._starts), [], [], [])

    def _met(self, start: int, end: int) -> tuple[int, int]:
        """Places of the pieces that share memory with [start, end)."""
        return bisect_right(self._ends, start), bisect_left(self._starts, end)

    def _replace(
        self, first: int, last: int, starts: list[int], ends: list[int], events: list[torch.Event | None]
    ) -> None:
        self._spare += [event for event in self._events[first:last] if event is not None]
        self._starts[first:last], self._ends[first:last], self._events[first:last] = starts, ends, events

    def _recorded(self) -> torch.Event:
        """An event at the end of what the current stream was told."""
        event = self._spare.pop() if self._spare else torch.Event(self.device, enable_timing=False)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def span(data: torch.Tensor) -> tuple[int, int]:
    """First address of a contiguous tensor, and the one behind it."""
    return data.data_ptr(), data.data_ptr() + data.nbytes
