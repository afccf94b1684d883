"""Where messages stand among the work of a rank: one rule for all schedules.

    rank 0   F0 RECV_B0 SEND_F0 F1 ...      a send follows what made it
    rank 1   RECV_F0 F0 RECV_F1 B0 ...      a receive is posted one piece of work ahead of the one that needs it, so
                                            that it lands meanwhile; earlier if its message leaves earlier

Early enough is before the message leaves, if work goes by the clock. Then no work that can be done at all is in a
deadlock, even if every send blocks until its receive is posted: sort what the ranks do by the time of the clock, and at
one time ends of work before receives before sends before starts of work. Each rank acts in this order, and whatever an
action waits for stands before it, so the first of the actions that are still to do can always be done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.clock import Done, clock, in_order
from hpcllm.pipeline.dependencies import Event, Work
from hpcllm.pipeline.placement import Placement

PLANNED = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1}  # durations by the clock
RECEIVES = {
    Op.FORWARD: Op.RECV_FORWARD,
    Op.BACKWARD: Op.RECV_BACKWARD,
    Op.BACKWARD_INPUT: Op.RECV_BACKWARD,
}
SENDS = {
    Op.FORWARD: Op.SEND_FORWARD,
    Op.BACKWARD: Op.SEND_BACKWARD,
    Op.BACKWARD_INPUT: Op.SEND_BACKWARD,
}


def with_messages(placement: Placement, work: Work) -> tuple[tuple[Action, ...], ...]:
    """The work of each rank with its messages. Raises ScheduleError if the work cannot be done in this order."""
    rows: list[list[Done]] = [[] for _ in work]
    sent: set[Event] = set()  # the work whose output leaves its rank
    for done in clock(in_order(placement, work), lambda _, action: PLANNED[action.op]):
        rows[done.rank].append(done)
        if done.source and done.source[0] != done.rank:
            sent.add(done.source)
    return tuple(_row(row, sent) for row in rows)


def _row(row: Sequence[Done], sent: set[Event]) -> tuple[Action, ...]:
    actions: list[Action] = []
    due: list[Action] = []  # the send of the work before
    for done, receives in zip(row, _posts(row), strict=True):
        actions += [*receives, *due, done.action]
        due = [message_of(SENDS, done.action)] if (done.rank, done.action) in sent else []
    return (*actions, *due)


def _posts(row: Sequence[Done]) -> list[list[Action]]:
    """Which receives are posted before each piece of work."""
    posts: list[list[Action]] = [[] for _ in row]
    ends = [0.0, *(done.end for done in row)]
    for place, done in enumerate(row):
        if done.source and done.source[0] != done.rank:
            in_time = bisect_right(ends, done.made) - 1  # the last piece of work before which is early enough
            posts[max(0, min(place - 1, in_time))].append(message_of(RECEIVES, done.action))
    return posts


def message_of(ops: dict[Op, Op], work: Action) -> Action:
    """The SENDS of what it makes, or the RECEIVES of what it needs."""
    return Action(ops[work.op], work.microbatch, work.chunk)
