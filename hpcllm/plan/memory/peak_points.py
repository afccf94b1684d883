"""Find the points of a schedule at which a rank may hold most, whatever the sizes of its tensors.

    rank 1 of 4, 1F1B     F0  F1  F2  B0  F3  B1  F4 ...
    held                  0   1   2   3   2   3   2           microbatches that went forward and are not yet back
    messages              1   2   3   4   4   4   4           receive buffers, what is handed over, what is leaving
                                      ^ of a hundred points these are all that can be the largest: B with 3 held,
                                  ^ and F with 2

So the peak of a step is the largest of a few sums, for tensors of any size. A schedule of many microbatches is as full
as one of a few more than its ranks, but for gpipe. Pure.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpcllm.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Placement, other_end
from hpcllm.pipeline.schedules import ORDER_DURATIONS, SCHEDULES, Schedule, make_placement, posted_at
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.sizes import Use
from hpcllm.plan.models import Model, StageKind, kinds_of, placement_of, stage_spans
from hpcllm.plan.numbered_work import NumberedWork, numbered_work

# op and chunk of a pass; messages that its rank begins to receive, and to send, between the pass before and this one
Turn = tuple[Op, int, int, int]
TURNS = 3  # turns of as many microbatches as ranks, until a schedule is as full as it gets


class PeakPoint(NamedTuple):
    """Counts when a pass begins: for each kind of chunk, microbatches held, how many of them are half gone back."""

    op: Op
    chunk: int  # its kind, numbered without repeats
    held: tuple[int, ...]
    halves: tuple[int, ...]
    messages: int

    def is_below(self, other: PeakPoint) -> bool:
        """Return True if it can never be the larger of two points that differ in microbatches and messages only."""
        return self.messages <= other.messages and all(map(operator.le, self.held, other.held))


@dataclass(frozen=True)
class PassUses:
    """Memory that the passes of a microbatch through one chunk use. backward: the first half, if it comes in two."""

    forward: Use
    backward: Use
    weights: Use

    def of(self, op: Op) -> Use:
        if op is Op.FORWARD:
            return self.forward
        return self.weights if op is Op.BACKWARD_WEIGHT else self.backward


def peak(points: Iterable[PeakPoint], chunks: Sequence[PassUses], message_bytes: int) -> int:
    """Return the bytes at the largest of some points. chunks: of the rank, in order."""
    held = [chunk.forward.net for chunk in chunks]
    halves = [chunk.backward.net for chunk in chunks]
    largest = 0
    for point in points:
        size = point.messages * message_bytes + chunks[point.chunk].of(point.op).peak
        size += sum(map(operator.mul, held, point.held)) + sum(map(operator.mul, halves, point.halves))
        largest = max(largest, size)
    return largest


def layout_points(
    model: Model, layout: Layout, microbatches: int, ranks: Iterable[int], with_messages: bool = True
) -> Iterator[tuple[tuple[StageKind, ...], list[StageKind], tuple[PeakPoint, ...]]]:
    """Yield for each pipeline rank the kinds of its chunks, the different ones of these, and the points with those.

    Without messages, which the ranks would have to be run together for, only its own work is looked at.
    """
    spans, placement = stage_spans(model, layout), placement_of(layout)
    find = schedule_points if with_messages else work_points
    for rank in ranks:
        kinds = kinds_of(spans, placement, rank)
        different = list(dict.fromkeys(kinds))
        alike = tuple(different.index(kind) for kind in kinds)
        yield kinds, different, find(layout.schedule, layout.pp, microbatches, rank, alike)


@lru_cache(maxsize=1 << 14)
def schedule_points(
    name: str, ranks: int, microbatches: int, rank: int, alike: tuple[int, ...]
) -> tuple[PeakPoint, ...]:
    """Find the points of a rank in a schedule by name that may be the largest. alike: the kind of each of its chunks.

    Raises ScheduleError.
    """
    placement, turns = _all_turns(name, ranks, _few(name, ranks, microbatches), len(alike))
    return _largest(_walk(placement, rank, turns[rank], alike))


@lru_cache(maxsize=1 << 14)
def work_points(name: str, ranks: int, microbatches: int, rank: int, alike: tuple[int, ...]) -> tuple[PeakPoint, ...]:
    """Find those points of a rank without its messages. Raises ScheduleError."""
    few = _few(name, ranks, microbatches)
    placement = make_placement(name, ranks, few, len(alike))
    turns = ((op, chunk, 0, 0) for op, _, chunk in SCHEDULES[name].order(placement, few, rank))
    return _largest(point._replace(messages=0) for point in _walk(placement, rank, turns, alike))


def _few(name: str, ranks: int, microbatches: int) -> int:
    """Return a number of microbatches that fills a schedule as much.

    The groups of an interleaved schedule differ where ranks do not divide microbatches.
    """
    if name == "gpipe" or (name == "interleaved" and microbatches % ranks):
        return microbatches
    return min(microbatches, TURNS * ranks if name != "1f1b" else ranks + 2)


def points_of(schedule: Schedule, rank: int) -> tuple[PeakPoint, ...]:
    """Find the points of a rank that may be the largest; each of its chunks is a kind of its own."""
    placement = schedule.placement
    return _largest(_walk(placement, rank, _turns(schedule.actions[rank]), range(placement.chunks)))


def _largest(points: Iterable[PeakPoint]) -> tuple[PeakPoint, ...]:
    kinds: dict[tuple[Op, int, tuple[int, ...]], list[PeakPoint]] = {}
    for point in dict.fromkeys(points):
        kinds.setdefault((point.op, point.chunk, point.halves), []).append(point)
    largest: list[PeakPoint] = []
    for kind in kinds.values():
        own: list[PeakPoint] = []
        for point in sorted(kind, key=lambda point: (sum(point.held), point.messages), reverse=True):
            if not any(map(point.is_below, own)):
                own.append(point)
        largest += own
    return tuple(largest)


def _turns(actions: Iterable[Action]) -> Iterator[Turn]:
    """Count messages from pass to pass."""
    counts = Counter[Op]()
    for action in actions:
        counts[action.op] += 1
        if action.op in COMPUTE:
            received, sent = (sum(counts[op] for op in set(ops.values())) for ops in (RECEIVES, SENDS))
            yield action.op, action.chunk, received, sent
            counts.clear()


@lru_cache(maxsize=16)
def _all_turns(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[Placement, list[list[Turn]]]:
    """Count messages from pass to pass on all ranks of a named schedule, as with_messages orders them."""
    work = numbered_work(name, ranks, chunks, microbatches)
    ends = work.ends([ORDER_DURATIONS[lane.op] for lane in work.lanes])
    sent = {lane.source for lane in work.lanes if lane.is_message}
    return work.placement, [_turns_of(work, row, ends, sent) for row in work.rows]


def _turns_of(work: NumberedWork, row: Sequence[int], ends: Sequence[float], sent: set[int]) -> list[Turn]:
    free = [0.0, *(ends[number] for number in row)]  # when the rank can begin each pass at the earliest
    lanes = [work.lane[number - 1] for number in row]
    received = [0] * len(row)
    for place, (number, lane) in enumerate(zip(row, lanes, strict=True)):
        if work.lanes[lane].is_message:
            received[posted_at(place, ends[work.source[number - 1]], free)] += 1
    passes = ([getattr(work.lanes[lane], key) for lane in lanes] for key in ("op", "chunk"))
    return list(zip(*passes, received, (0, *(int(lane in sent) for lane in lanes[:-1])), strict=True))


def _walk(placement: Placement, rank: int, turns: Iterable[Turn], alike: Sequence[int]) -> Iterator[PeakPoint]:
    """Yield the counts when each pass begins.

    Messages are hidden states and their gradients: in receive buffers, which are reused and never given back; handed
    over between chunks of this rank, or made and not yet sent; leaving, until the next send finds them gone.
    """
    held, halves = [0] * (max(alike) + 1), [0] * (max(alike) + 1)
    pool = taken = here = leaving = 0  # receive buffers, and those in use
    effects = {(op, chunk): _effect(placement, rank, op, chunk) for chunk in range(placement.chunks) for op in COMPUTE}
    for op, chunk, received, sent in turns:
        taken, here = taken + received, here - sent
        pool, leaving = max(pool, taken), leaving or min(sent, 1)
        kind = alike[chunk]
        yield PeakPoint(op, kind, tuple(held), tuple(halves), pool + here + leaving)
        more_held, more_halves, more_taken, more_here = effects[op, chunk]
        held[kind] += more_held
        halves[kind] += more_halves
        taken, here = taken + more_taken, here + more_here


# what a pass adds to the microbatches held, and to those that are half gone back
_ADDED = {Op.FORWARD: (1, 0), Op.BACKWARD: (-1, 0), Op.BACKWARD_INPUT: (0, 1), Op.BACKWARD_WEIGHT: (-1, -1)}


def _effect(placement: Placement, rank: int, op: Op, chunk: int) -> tuple[int, int, int, int]:
    """Return what a pass adds to microbatches held, those half gone back, receive buffers in use, messages here."""
    stage, taken, here = placement.stage(rank, chunk), 0, 0
    read = []  # messages that nothing needs after this pass
    if op is Op.FORWARD and stage < placement.stages - 1:
        here += 1
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and stage > 0:
        here += 1
        read.append(Op.RECV_FORWARD)
    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) and stage < placement.stages - 1:
        read.append(Op.RECV_BACKWARD)
    for receive in read:
        is_own = other_end(placement, rank, Action(receive, 0, chunk))[0] == rank
        taken, here = taken - (not is_own), here - is_own
    return *_ADDED[op], taken, here
