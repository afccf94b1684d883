"""The proof that a schedule runs to its end and computes what it should; or which rank waits for whom. Pure.

each rank      every forward and every backward pass once, in a legal order, with its messages around it
each message   sent once and received once, between two ranks, by the two ends that the placement says
all ranks      reach their end, even if every send blocks until its receive is posted (rendezvous): then also with
               any MPI library that buffers more. They are walked through what they do; if nobody can go on,
               there is a circle:  rank 0 at SEND_F1 waits for rank 1 to post RECV_F1; rank 1 at ...
tags           of messages that could be taken for each other, between two ranks and with one tag, the receives are
               posted in the order of the sends, in which MPI matches them (MPI 4.1, section 3.5)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from hpcllm.errors import ScheduleError
from hpcllm.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, B, F, I, Op, W, message_tag, other_end
from hpcllm.pipeline.clock import Event, Needs, compute_needs, walk
from hpcllm.pipeline.schedules import Schedule

Places = dict[Action, int]  # index of each action in its rank's row


def check(schedule: Schedule, backward: bool = True) -> None:
    """Prove a schedule; raises ScheduleError with what is wrong, where, and who waits for whom.

    backward False: the schedule has forward passes alone.
    """
    rows = [_places(rank, row) for rank, row in enumerate(schedule.actions)]
    for rank, places in enumerate(rows):
        _check_work(schedule, rank, places, backward)
    needs = compute_needs(schedule.placement, schedule.work())
    _check_messages(schedule, rows, needs)
    _check_tags(schedule)
    for _ in walk(schedule.actions, _rendezvous(schedule, needs)):
        pass


def _places(rank: int, row: Sequence[Action]) -> Places:
    places: Places = {}
    for place, action in enumerate(row):
        if action in places:
            raise ScheduleError(f"rank {rank}: {action} twice")
        places[action] = place
    return places


def _check_work(schedule: Schedule, rank: int, places: Places, backward: bool) -> None:
    """Check that every pass is there once, forward before backward."""
    for m in range(schedule.microbatches):
        for chunk in range(schedule.placement.chunks):
            passes = [Action(op, m, chunk) for op in (F, B, I, W)]
            found = [action for action in passes if action in places]
            wrong = _wrong_passes(found, passes, backward)
            if not wrong and sorted(found, key=places.__getitem__) != found:
                wrong = f"{', '.join(map(str, found))} have to come in this order"
            if wrong:
                raise ScheduleError(f"rank {rank}: {wrong}")


def _wrong_passes(found: list[Action], passes: list[Action], backward: bool) -> str:
    f, b, i, w = passes
    if f not in found:
        return f"{f} is missing"
    if not backward:
        return f"{found[1]} among forward passes alone" if len(found) > 1 else ""
    if found not in ([f, b], [f, i, w]):
        return f"{f} needs either {b}, or {i} and {w}, but has {', '.join(map(str, found[1:])) or 'none of them'}"
    return ""


def _check_messages(schedule: Schedule, rows: list[Places], needs: Needs) -> None:
    """Check for two ends of each input that another rank makes, each beside its work; and no other message."""
    expected: set[Event] = set()
    for rank, earlier, later in _neighbours(schedule, needs):
        message, work = (earlier, later) if later.op in COMPUTE else (later, earlier)
        if message not in rows[rank]:
            raise ScheduleError(f"rank {rank}: {message} is missing, which belongs to {work}")
        if rows[rank][earlier] > rows[rank][later]:
            raise ScheduleError(f"rank {rank}: {later} comes before {earlier}, but needs it")
        expected.add((rank, message))
    for rank, places in enumerate(rows):
        for message in places:
            if message.op not in COMPUTE and (rank, message) not in expected:
                raise ScheduleError(f"rank {rank}: {message} has no other end, for no other rank makes or needs it")


def _neighbours(schedule: Schedule, needs: Needs) -> Iterator[tuple[int, Action, Action]]:
    """Yield a rank, and two of its actions of which the later needs the earlier: work and its message."""
    for rank, row in enumerate(schedule.work()):
        for action in row:
            source = needs(rank, action)
            if source and source[0] != rank:
                yield rank, action.message(RECEIVES), action
                yield source[0], source[1], source[1].message(SENDS)


def _check_tags(schedule: Schedule) -> None:
    """Check that the messages that MPI matches, by source, target, tag and order, belong together."""
    sent: defaultdict[tuple[int, int, int], list[Action]] = defaultdict(
        list
    )  # source, target, tag -> RECVs of the sends
    posted: defaultdict[tuple[int, int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.op in COMPUTE:
                continue
            peer, other = other_end(schedule.placement, rank, action)
            if action.op in SENDS.values():
                sent[rank, peer, _tag(schedule, other)].append(other)
            else:
                posted[peer, rank, _tag(schedule, action)].append(action)
    for (source, target, tag), receives in posted.items():
        for meant, receive in zip(sent[source, target, tag], receives, strict=True):
            if meant != receive:
                raise ScheduleError(
                    f"rank {target} posts {receive} where rank {source} sends what is for {meant}, and MPI cannot tell "
                    f"them apart: both have tag {tag}"
                )


def _tag(schedule: Schedule, receive: Action) -> int:
    backward = receive.op is Op.RECV_BACKWARD
    return message_tag(receive.microbatch, receive.chunk, schedule.placement.chunks, backward)


def _rendezvous(schedule: Schedule, needs: Needs) -> Needs:
    """Make a function from an action to what it waits for if a send lasts until its receive is posted."""

    def waits(rank: int, action: Action) -> Event | None:
        if action.op in RECEIVES.values():
            return None
        if action.op in SENDS.values():
            return other_end(schedule.placement, rank, action)
        source = needs(rank, action)
        return (source[0], source[1].message(SENDS)) if source and source[0] != rank else source

    return waits
