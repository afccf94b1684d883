"""Dependencies of work, an order in which all of it can happen, and the start and end of each piece. Pure.

F m of a stage needs F m of the stage before; B m (or I m) needs B m (or I m) of the stage after, and on the last stage
its own F m; W m needs its own I m. Each rank does its work in its own order. Either all of it can happen:

    rank 0   F0 F1 .  .  B0 ...        F1 starts when rank 0 is free; B0 when the gradient that rank 1 made by its B0
    rank 1   .  F0 B0 F1 ...           has arrived: `send` after that ended, or at once if it was made on this rank

or ranks wait in a circle:

    rank 0   F0 B0 F1                  rank 0 at B0 waits for rank 1 to do B0;
    rank 1   F0 F1 B0                  rank 1 at F1 waits for rank 0 to do F1: a deadlock
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op, Placement

Event = tuple[int, Action]  # a rank and its action
Work = Sequence[Sequence[Action]]  # the actions of each rank, in its order
Needs = Callable[[int, Action], Event | None]
Step = tuple[int, Action, Event | None]  # a rank, its action, and the event that had to happen before
Span = tuple[Action, float, float]  # an action, its start and its end
Duration = Callable[[int, Action], float]  # how long a rank's action takes


class Done(NamedTuple):
    """A piece of work with its times, in the unit of the durations."""

    rank: int
    action: Action
    source: Event | None  # where its input was made; None: it comes from the data set
    made: float  # when its input was made
    start: float
    end: float


def clock(
    order: Iterable[Step],
    duration: Duration,
    send: float = 0,
    pause: Duration = lambda _rank, _action: 0,
    entries: Sequence[float] = (),
) -> Iterator[Done]:
    """Yield the actions of `in_order` with their times: each starts once its rank is free and its input is there.

    A message costs its sender nothing. send: from the end of an action to when its output is on another rank; pause:
    how long a rank is busy with something else before an action; entries: when each rank begins, else at 0. All in the
    unit of the durations.
    """
    ends: dict[Event, float] = {}
    free: defaultdict[int, float] = defaultdict(int, enumerate(entries))  # an int at first: fractions stay exact
    for rank, action, source in order:
        made: float = ends[source] if source else 0
        start = max(free[rank] + pause(rank, action), made + send if source and source[0] != rank else made)
        free[rank] = ends[rank, action] = start + duration(rank, action)
        yield Done(rank, action, source, made, start, free[rank])


def spans_of(done: Iterable[Done], ranks: int) -> list[list[Span]]:
    """The spans of each rank."""
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for it in done:
        spans[it.rank].append((it.action, it.start, it.end))
    return spans


def in_order(placement: Placement, work: Work) -> Iterator[Step]:
    """Yield all compute actions, each rank's in its order, none before its input.

    Raises ScheduleError if that is impossible.
    """
    return walk(work, compute_needs(placement, work))


def compute_needs(placement: Placement, work: Work) -> Needs:
    """A function from a compute action to the event that makes its input, on any rank; None: the data set."""
    halved = {(rank, action) for rank, row in enumerate(work) for action in row if action.op is Op.BACKWARD_INPUT}
    homes = [placement.home(stage) for stage in range(placement.stages)]
    stages = {home: stage for stage, home in enumerate(homes)}

    def at(stage: int, op: Op, microbatch: int) -> Event:
        rank, chunk = homes[stage]
        return rank, Action(op, microbatch, chunk)

    def needs(rank: int, action: Action) -> Event | None:
        op, m, chunk = action
        if op is Op.BACKWARD_WEIGHT:
            return rank, Action(Op.BACKWARD_INPUT, m, chunk)
        stage = stages[rank, chunk]
        if op is Op.FORWARD:
            return at(stage - 1, op, m) if stage else None
        if stage + 1 == placement.stages:
            return rank, Action(Op.FORWARD, m, chunk)
        half = at(stage + 1, Op.BACKWARD_INPUT, m)
        return half if half in halved else at(stage + 1, Op.BACKWARD, m)

    return needs


def walk(work: Work, needs: Needs) -> Iterator[Step]:
    """Yield every action of every rank, in an order in which it can happen.

    Raises ScheduleError at the end of what can happen, if that is not everything: who waits for whom.
    """
    place, done = [0] * len(work), set[Event]()
    asleep: dict[Event, list[int]] = {}  # event -> the ranks that wait for it
    awake = list(range(len(work)))
    while awake:
        rank = awake.pop()
        while place[rank] < len(work[rank]):
            action = work[rank][place[rank]]
            need = needs(rank, action)
            if need is not None and need not in done:
                asleep.setdefault(need, []).append(rank)
                break
            yield rank, action, need
            place[rank] += 1
            done.add((rank, action))
            awake += asleep.pop((rank, action), ())
    if asleep:
        raise ScheduleError(_circle(work, place, {rank: need for need, ranks in asleep.items() for rank in ranks}))


def _circle(work: Work, place: list[int], waits: dict[int, Event]) -> str:
    """Name the circle of waiting ranks, a sentence each, or the first wait for what will never be done."""
    path, sentences = [min(waits)], list[str]()
    while True:
        rank, (peer, awaited) = path[-1], waits[path[-1]]
        verb = "post" if awaited.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD) else "do"
        whom = "itself" if peer == rank else f"rank {peer}"
        sentences.append(f"rank {rank} at {work[rank][place[rank]]} waits for {whom} to {verb} {awaited}")
        if awaited not in work[peer]:
            return f"{sentences[-1]}, which it never does"
        if peer in path:
            return f"a deadlock: {'; '.join(sentences[path.index(peer) :])}"
        path.append(peer)
