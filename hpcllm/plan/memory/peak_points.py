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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.pipeline.actions import COMPUTE, Action, Op, other_end
from hpcllm.pipeline.schedules import Schedule, make_schedule
from hpcllm.plan.layouts import Layout
from hpcllm.plan.memory.sizes import Use
from hpcllm.plan.models import Model, StageKind, kinds_of, placement_of, stage_spans

TURNS = 3  # turns of as many microbatches as ranks, until a schedule is as full as it gets


@dataclass(frozen=True)
class PeakPoint:
    """Counts when a pass begins: for each chunk, microbatches held, and how many of those are half gone back."""

    op: Op
    chunk: int
    held: tuple[int, ...]
    halves: tuple[int, ...]
    messages: int

    def merged(self, alike: tuple[int, ...]) -> PeakPoint:
        """Count chunks that are alike as one: alike[chunk] is the first such one, numbered without repeats."""
        held, halves = [0] * (max(alike) + 1), [0] * (max(alike) + 1)
        for chunk, joint in enumerate(alike):
            held[joint] += self.held[chunk]
            halves[joint] += self.halves[chunk]
        return PeakPoint(self.op, alike[self.chunk], tuple(held), tuple(halves), self.messages)

    def is_below(self, other: PeakPoint) -> bool:
        """Return True if it can never be the larger of two points that differ in microbatches and messages only."""
        fewer = all(mine <= theirs for mine, theirs in zip(self.held, other.held, strict=True))
        return fewer and self.messages <= other.messages


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
    model: Model, layout: Layout, microbatches: int
) -> Iterator[tuple[tuple[StageKind, ...], list[StageKind], tuple[PeakPoint, ...]]]:
    """Yield for each pipeline rank the kinds of its chunks, the different ones of these, and the points with those."""
    spans, placement = stage_spans(model, layout), placement_of(layout)
    for rank in range(layout.pp):
        kinds = kinds_of(spans, placement, rank)
        different = list(dict.fromkeys(kinds))
        alike = tuple(different.index(kind) for kind in kinds)
        yield kinds, different, schedule_points(layout.schedule, layout.pp, microbatches, rank, alike)


@lru_cache(maxsize=1 << 14)
def schedule_points(
    name: str, ranks: int, microbatches: int, rank: int, alike: tuple[int, ...]
) -> tuple[PeakPoint, ...]:
    """Find the points of a rank in a schedule by name. alike: of its chunks, as in PeakPoint.merged.

    Raises ScheduleError.
    """
    few = _few(name, ranks, microbatches)
    return _largest(point.merged(alike) for point in _all_points(name, ranks, few, len(alike))[rank])


@lru_cache(maxsize=256)
def _all_points(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[PeakPoint, ...], ...]:
    schedule = make_schedule(name, ranks, microbatches, chunks)
    return tuple(points_of(schedule, rank) for rank in range(ranks))


def _few(name: str, ranks: int, microbatches: int) -> int:
    """Return a number of microbatches that fills a schedule as much.

    The groups of an interleaved schedule differ where ranks do not divide microbatches.
    """
    if name == "gpipe" or (name == "interleaved" and microbatches % ranks):
        return microbatches
    return min(microbatches, TURNS * ranks if name != "1f1b" else ranks + 2)


def points_of(schedule: Schedule, rank: int) -> tuple[PeakPoint, ...]:
    """Find all points of a rank that may be the largest."""
    return _largest(_walk(schedule, rank))


def _largest(points: Iterable[PeakPoint]) -> tuple[PeakPoint, ...]:
    kinds: dict[tuple[Op, int, tuple[int, ...]], dict[PeakPoint, None]] = {}
    for point in points:
        kinds.setdefault((point.op, point.chunk, point.halves), {})[point] = None
    largest: list[PeakPoint] = []
    for kind in kinds.values():
        own: list[PeakPoint] = []
        for point in sorted(kind, key=lambda point: (sum(point.held), point.messages), reverse=True):
            if not any(point.is_below(other) for other in own):
                own.append(point)
        largest += own
    return tuple(largest)


def _walk(schedule: Schedule, rank: int) -> Iterable[PeakPoint]:
    placement = schedule.placement
    held, halves = [0] * placement.chunks, [0] * placement.chunks
    messages = _Messages(schedule, rank)
    for action in schedule.actions[rank]:
        messages.before(action)
        if action.op in COMPUTE:
            yield PeakPoint(action.op, action.chunk, tuple(held), tuple(halves), messages.count)
            more_held, more_halves = _ADDED[action.op]
            held[action.chunk] += more_held
            halves[action.chunk] += more_halves
        messages.after(action)


# what a pass adds to the microbatches held, and to those that are half gone back
_ADDED = {Op.FORWARD: (1, 0), Op.BACKWARD: (-1, 0), Op.BACKWARD_INPUT: (0, 1), Op.BACKWARD_WEIGHT: (-1, -1)}


@dataclass
class _Messages:
    """Count hidden states and their gradients at the ends of a rank's chunks: received, handed over, waiting to leave.

    Receive buffers are reused and never given back; a sent message is there until the next send finds it gone.
    """

    schedule: Schedule
    rank: int
    pool: int = 0  # receive buffers
    taken: int = 0  # receive buffers in use
    here: int = 0  # handed over between chunks of this rank, or made and not yet sent
    leaving: int = 0

    @property
    def count(self) -> int:
        return self.pool + self.here + self.leaving

    def before(self, action: Action) -> None:
        if action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
            self.taken += 1
            self.pool = max(self.pool, self.taken)

    def after(self, action: Action) -> None:
        op, place = action.op, self.schedule.placement
        stage = place.stage(self.rank, action.chunk)
        is_first, is_last = stage == 0, stage == place.stages - 1
        if op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            self.here, self.leaving = self.here - 1, 1
        if op is Op.FORWARD and not is_last:
            self.here += 1
        if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and not is_first:
            self.here += 1
            self._release(Op.RECV_FORWARD, action)
        if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) and not is_last:
            self._release(Op.RECV_BACKWARD, action)

    def _release(self, receive: Op, action: Action) -> None:
        """Free the memory that a pass read from: a receive buffer, or a tensor of another chunk of this rank."""
        made_by = Action(receive, action.microbatch, action.chunk)
        if other_end(self.schedule.placement, self.rank, made_by)[0] == self.rank:
            self.here -= 1
        else:
            self.taken -= 1
