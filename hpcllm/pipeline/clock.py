"""When each piece of work starts and ends, if every rank begins as soon as it is free and its input is there.

rank 0   F0 F1 .  .  B0 ...        F1 starts when rank 0 is free; B0 when the gradient that rank 1 made by its B0
rank 1   .  F0 B0 F1 ...           has arrived: `send` after that ended, or at once if it was made on this rank
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcllm.pipeline.actions import Action
from hpcllm.pipeline.dependencies import Event, Step, Work, compute_needs, walk
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


Duration = Callable[[int, Action], float]  # of a rank's action


def in_order(placement: Placement, work: Work) -> Iterator[Step]:
    """All compute actions, each rank's in its order, none before its input. Raises ScheduleError if that cannot be."""
    return walk(work, compute_needs(placement, work))


def clock(
    order: Iterable[Step],
    duration: Duration,
    send: float = 0,
    pause: Duration = lambda _rank, _action: 0,
    entries: Sequence[float] = (),
) -> Iterator[Done]:
    """When the actions of `in_order` run. A message costs its sender nothing.

    send: from the end of an action to when what it made is on another rank; pause: how long a rank is busy with
    something else before an action; entries: when each rank begins, else at 0. All in the unit of the durations.
    """
    ends: dict[Event, float] = {}
    free: defaultdict[int, float] = defaultdict(int, enumerate(entries))  # an int at first: fractions stay exact
    for rank, action, source in order:
        made: float = ends[source] if source else 0
        start = max(free[rank] + pause(rank, action), made + send if source and source[0] != rank else made)
        free[rank] = ends[rank, action] = start + duration(rank, action)
        yield Done(rank, action, source, made, start, free[rank])


def spans_of(done: Iterable[Done], ranks: int) -> list[list[Span]]:
    """What each rank does when."""
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for it in done:
        spans[it.rank].append((it.action, it.start, it.end))
    return spans
