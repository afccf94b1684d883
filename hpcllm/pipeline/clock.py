"""When each piece of work starts and ends, if every rank begins as soon as it is free and its input is there.

rank 0   F0 F1 .  .  B0 ...        F1 starts when rank 0 is free; B0 when the gradient that rank 1 made by its B0
rank 1   .  F0 B0 F1 ...           has arrived: `send` after that ended, or at once if it was made on this rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hpcllm.pipeline.actions import Action
from hpcllm.pipeline.dependencies import Event, Work, compute_needs, walk
from hpcllm.pipeline.placement import Placement

Span = tuple[Action, float, float]  # start and end


class Done(NamedTuple):
    """A piece of work with its times, in the unit of the durations."""

    rank: int
    action: Action
    source: Event | None  # where its input was made; None: it comes from the data set
    made: float  # when that ended
    start: float
    end: float


def clock(
    placement: Placement, work: Work, duration: Callable[[int, Action], float], send: float = 0
) -> Iterator[Done]:
    """All compute actions, each rank's in its order. A message costs its sender nothing.

    duration(rank, action) and send have one unit. Raises ScheduleError if the work cannot be done in this order.
    """
    ends: dict[Event, float] = {}
    free: list[float] = [0] * len(work)
    for rank, action, source in walk(work, compute_needs(placement, work)):
        made: float = ends[source] if source else 0
        start = max(free[rank], made + send if source and source[0] != rank else made)
        free[rank] = ends[rank, action] = start + duration(rank, action)
        yield Done(rank, action, source, made, start, free[rank])
