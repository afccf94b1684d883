"""When a rank of a pipeline may hold most: what it holds at each work of its schedule, counted, whatever the sizes.

    rank 1 of 4, 1F1B     F0  F1  F2  B0  F3  B1  F4 ...
    held                  0   1   2   3   2   3   2           microbatches that went forward and are not yet back
    messages              1   2   3   4   4   4   4           receive buffers, what is handed over, what is leaving
                                      ^ of a hundred moments these are all that can be the largest: B with 3 held,
                                  ^ and F with 2

So the peak of a step is the largest of a few sums, for tensors of any size. A schedule of many microbatches is as full
as one of a few more than its ranks, but for gpipe. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.pipeline.actions import COMPUTE, Action, Op
from hpcllm.pipeline.messages import other_end
from hpcllm.pipeline.schedules import Schedule, make_schedule
from hpcllm.plan.memory.ledger import Use

TURNS = 3  # of as many microbatches as ranks, until a schedule is as full as it gets


@dataclass(frozen=True)
class Moment:
    """What is there when a piece of work begins. Of each chunk: microbatches held, and those of them half gone back."""

    op: Op
    chunk: int
    held: tuple[int, ...]
    halves: tuple[int, ...]
    messages: int

    def joined(self, alike: tuple[int, ...]) -> Moment:
        """With chunks that are alike as one: alike[chunk] is the first such one, counted without repeats."""
        held, halves = [0] * (max(alike) + 1), [0] * (max(alike) + 1)
        for chunk, joint in enumerate(alike):
            held[joint] += self.held[chunk]
            halves[joint] += self.halves[chunk]
        return Moment(self.op, alike[self.chunk], tuple(held), tuple(halves), self.messages)

    def is_below(self, other: Moment) -> bool:
        """Whether it can never be the larger of the two, which differ in what is held and in messages only."""
        fewer = all(mine <= theirs for mine, theirs in zip(self.held, other.held, strict=True))
        return fewer and self.messages <= other.messages


@dataclass(frozen=True)
class PassUses:
    """What the passes of a microbatch through one chunk take. backward: its first half, where it comes in two."""

    forward: Use
    backward: Use
    weights: Use

    def of(self, op: Op) -> Use:
        if op is Op.FORWARD:
            return self.forward
        return self.weights if op is Op.BACKWARD_WEIGHT else self.backward


def peak(moments: Iterable[Moment], chunks: Sequence[PassUses], message_bytes: int) -> int:
    """Bytes at the largest of some moments. chunks: of the rank, in order."""
    held = [chunk.forward.net for chunk in chunks]
    halves = [chunk.backward.net for chunk in chunks]
    largest = 0
    for moment in moments:
        size = moment.messages * message_bytes + chunks[moment.chunk].of(moment.op).peak
        for net, count in zip(held, moment.held, strict=True):
            size += net * count
        for net, count in zip(halves, moment.halves, strict=True):
            size += net * count
        largest = max(largest, size)
    return largest


@lru_cache(maxsize=1 << 14)
def usual_moments(name: str, ranks: int, microbatches: int, rank: int, alike: tuple[int, ...]) -> tuple[Moment, ...]:
    """Of a rank, in a schedule that has a name; `alike`: of its chunks, as Moment.joined. Raises ScheduleError."""
    few = _few(name, ranks, microbatches)
    return _largest(moment.joined(alike) for moment in _moments(name, ranks, few, len(alike))[rank])


@lru_cache(maxsize=256)
def _moments(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Moment, ...], ...]:
    schedule = make_schedule(name, ranks, microbatches, chunks)
    return tuple(moments_of(schedule, rank) for rank in range(ranks))


def _few(name: str, ranks: int, microbatches: int) -> int:
    """Microbatches of a schedule that is as full. The groups of an interleaved one differ where ranks do not divide."""
    if name == "gpipe" or (name == "interleaved" and microbatches % ranks):
        return microbatches
    return min(microbatches, TURNS * ranks if name != "1f1b" else ranks + 2)


def moments_of(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """All moments of a rank that may be the largest."""
    return _largest(_walk(schedule, rank))


def _largest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    kinds: dict[tuple[Op, int, tuple[int, ...]], dict[Moment, None]] = {}
    for moment in moments:
        kinds.setdefault((moment.op, moment.chunk, moment.halves), {})[moment] = None
    largest: list[Moment] = []
    for kind in kinds.values():
        own: list[Moment] = []
        for moment in sorted(kind, key=lambda moment: (sum(moment.held), moment.messages), reverse=True):
            if not any(moment.is_below(other) for other in own):
                own.append(moment)
        largest += own
    return tuple(largest)


def _walk(schedule: Schedule, rank: int) -> Iterable[Moment]:
    placement = schedule.placement
    held, halves = [0] * placement.chunks, [0] * placement.chunks
    messages = _Messages(schedule, rank)
    for action in schedule.actions[rank]:
        messages.before(action)
        if action.op in COMPUTE:
            yield Moment(action.op, action.chunk, tuple(held), tuple(halves), messages.count)
            held[action.chunk] += _HELD[action.op]
            halves[action.chunk] += _HALVES[action.op]
        messages.after(action)


_HELD = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: 0, Op.BACKWARD_WEIGHT: -1}
_HALVES = {Op.FORWARD: 0, Op.BACKWARD: 0, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: -1}


@dataclass
class _Messages:
    """Hidden states and their gradients at the ends of a rank's chunks: received, handed over, waiting to leave.

    Receive buffers are used again and never given back; what is sent is there until the next send finds it gone.
    """

    schedule: Schedule
    rank: int
    pool: int = 0  # receive buffers
    taken: int = 0  # of them
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
        """The memory that a pass read from: a receive buffer, or a tensor of another chunk of this rank."""
        other = Action(receive, action.microbatch, action.chunk)
        peer, _ = other_end(self.schedule.placement, self.rank, other)
        if peer == self.rank:
            self.here -= 1
        else:
            self.taken -= 1
