"""Who needs what from whom, and an order in which it can all happen, or the circle in which ranks wait.

F m of a stage needs F m of the stage before; B m (or I m) needs B m (or I m) of the stage after, and on the last stage
its own F m; W m needs its own I m. What a rank does it does in its order:

    rank 0   F0 B0 F1         rank 0 at B0 waits for rank 1 to do B0;
    rank 1   F0 F1 B0         rank 1 at F1 waits for rank 0 to do F1: a deadlock
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.placement import Placement

Event = tuple[int, Action]  # a rank does an action
Work = Sequence[Sequence[Action]]  # of each rank, in its order
Needs = Callable[[int, Action], Event | None]
Step = tuple[int, Action, Event | None]  # a rank, what it does, what had to happen before


def compute_needs(placement: Placement, work: Work) -> Needs:
    """What each compute action takes as its input, wherever that is made; None: the data set."""
    halved = {(rank, action) for rank, row in enumerate(work) for action in row if action.op is Op.BACKWARD_INPUT}
    homes = [placement.home(stage) for stage in range(placement.stages)]
    stages = {home: stage for stage, home in enumerate(homes)}

    def needs(rank: int, action: Action) -> Event | None:
        op, m, chunk = action.op, action.microbatch, action.chunk
        if op is Op.BACKWARD_WEIGHT:
            return rank, Action(Op.BACKWARD_INPUT, m, chunk)
        stage = stages[rank, chunk]
        if op is Op.FORWARD:
            return _at(homes[stage - 1], op, m) if stage else None
        if stage + 1 == placement.stages:
            return rank, Action(Op.FORWARD, m, chunk)
        half = _at(homes[stage + 1], Op.BACKWARD_INPUT, m)
        return half if half in halved else _at(homes[stage + 1], Op.BACKWARD, m)

    return needs


def walk(work: Work, needs: Needs) -> Iterator[Step]:
    """Every action of every rank, in an order in which it can happen.

    Raises ScheduleError at the end of what can happen, if that is not everything: who waits for whom.
    """
    place, done = [0] * len(work), set[Event]()
    asleep: dict[Event, list[int]] = {}  # what would wake whom
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


def _at(home: tuple[int, int], op: Op, microbatch: int) -> Event:
    return home[0], Action(op, microbatch, home[1])


def _circle(work: Work, place: list[int], waits: dict[int, Event]) -> str:
    """The circle of waiting ranks, a sentence each, or the first wait for what will never be done."""
    path, told = [min(waits)], list[str]()
    while True:
        rank, (peer, awaited) = path[-1], waits[path[-1]]
        told.append(_sentence(rank, work[rank][place[rank]], peer, awaited))
        if awaited not in work[peer]:
            return f"{told[-1]}, which it never does"
        if peer in path:
            return f"a deadlock: {'; '.join(told[path.index(peer) :])}"
        path.append(peer)


def _sentence(rank: int, action: Action, peer: int, awaited: Action) -> str:
    verb = "post" if awaited.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD) else "do"
    return f"rank {rank} at {action} waits for {'itself' if peer == rank else f'rank {peer}'} to {verb} {awaited}"
