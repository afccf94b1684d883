"""Pipeline schedules as data: the actions of each rank in their order, messages included. Pure.

    make_schedule("1f1b", ranks=2, microbatches=2)       orders.py: the work       with_messages: the messages

    rank 0: F0 RECV_B0 SEND_F0 F1 RECV_B1 SEND_F1 B0 B1
    rank 1: RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1

The engine runs a schedule, the checker proves it, the clock times it, the drawing shows it. As text it can be kept,
changed by hand and read again.

Order of messages, one rule for all schedules: a send follows the work that made its content; a receive is posted one
piece of work ahead of the one that needs it, so that it lands meanwhile, and earlier if its message leaves earlier.
Early enough is before the message leaves, if work goes by the clock. Then no work that can be done at all is in a
deadlock, even if every send blocks until its receive is posted: sort what the ranks do by the time of the clock, and at
one time ends of work before receives before sends before starts of work. Each rank acts in this order, and whatever an
action waits for comes before it, so the first of the actions that are still to do can always be done.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from hpcllm.config.names import closest
from hpcllm.errors import ScheduleError
from hpcllm.pipeline import orders
from hpcllm.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Placement, PlacementKind
from hpcllm.pipeline.clock import Done, Event, Work, clock, in_order

MOST_PASSES = 1 << 22  # microbatches x virtual stages of a plan, which knows how long schedules go on
MOST_SCHEDULED = 1 << 17  # of a schedule with all its messages, half a minute to make and prove
LONGEST_WORD = 40  # characters of a strange word that an error repeats
ORDER_DURATIONS = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1}  # for with_messages


@dataclass(frozen=True)
class Schedule:
    """Actions of all ranks, microbatches and chunks in range; `check` proves that it ends. Raises ScheduleError."""

    name: str
    placement: Placement
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # of each rank, messages included

    def __post_init__(self) -> None:
        _check_sizes(self.placement, self.microbatches, MOST_SCHEDULED)
        if not self.name.isprintable() or self.name.strip() != self.name or not self.name:
            raise ScheduleError(f"a schedule's name is one line of printable characters, not {_short(self.name)}")
        if len(self.actions) != self.placement.ranks:
            raise ScheduleError(f"a schedule for {self.placement.ranks} ranks has actions of {len(self.actions)}")
        for rank, row in enumerate(self.actions):
            for action in row:
                if wrong := _out_of_range(action, self.placement, self.microbatches):
                    raise ScheduleError(f"rank {rank}: {wrong}")

    def work(self) -> list[list[Action]]:
        """The compute actions of each rank."""
        return [[action for action in row if action.op in COMPUTE] for row in self.actions]

    def title(self) -> str:
        """Name and shape, in words."""
        placement = self.placement
        chunks = f" of {placement.chunks} chunks ({placement.kind})" if placement.chunks > 1 else ""
        return f"{self.name}: {placement.ranks} ranks{chunks}, {self.microbatches} microbatches"

    def shape(self) -> dict[str, str | int]:
        """Name and shape for texts, reports and traces, by the keys of HEADER."""
        place = self.placement
        return dict(zip(HEADER, (self.name, place.ranks, place.chunks, place.kind, self.microbatches), strict=True))

    def text(self) -> str:
        """The schedule as read_schedule reads it."""
        lines = [f"{key} {value}" for key, value in self.shape().items()]
        lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Kind:
    """A named schedule: the order of a rank's work, and the placement of its chunks."""

    order: Callable[[Placement, int, int], Iterator[Action]]  # placement, microbatches, rank -> its work
    placement: Placement  # of one rank, with the usual chunks
    any_chunks: bool = False


SCHEDULES = {
    "gpipe": Kind(orders.gpipe, Placement(1)),
    "1f1b": Kind(orders.one_f_one_b, Placement(1)),
    "interleaved": Kind(orders.interleaved, Placement(1, 2), any_chunks=True),
    "zb-h1": Kind(orders.zb_h1, Placement(1)),
    "zb-v": Kind(orders.zb_v, Placement(1, 2, "v")),
}


def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, most: int = MOST_SCHEDULED
) -> Schedule:
    """Make the schedule of a name in SCHEDULES, of at most so many forward passes; chunks None: the usual number.

    Raises ScheduleError.
    """
    name = name.lower()
    make_placement(name, ranks, microbatches, chunks, most)
    placement, work = make_work(name, ranks, microbatches, chunks)
    return Schedule(name, placement, microbatches, with_messages(placement, work))


def make_work(
    name: str, ranks: int, microbatches: int, chunks: int | None = None
) -> tuple[Placement, list[list[Action]]]:
    """Make the placement and the compute actions of each rank, without messages. Raises ScheduleError."""
    placement = make_placement(name, ranks, microbatches, chunks)
    return placement, [list(SCHEDULES[name].order(placement, microbatches, rank)) for rank in range(ranks)]


def make_placement(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, most: int = MOST_PASSES
) -> Placement:
    """Make the placement of a named schedule. Raises ScheduleError if there is no such schedule."""
    if name not in SCHEDULES:
        near = closest(name, SCHEDULES)
        hint = f"; did you mean {near}?" if near else ""
        raise ScheduleError(f"there is no schedule {_short(name)}; there are {', '.join(SCHEDULES)}{hint}")
    kind = SCHEDULES[name]
    usual = kind.placement.chunks
    placement = replace(kind.placement, ranks=ranks, chunks=usual if chunks is None else chunks)
    _check_sizes(placement, microbatches, most)
    if placement.chunks != usual and not kind.any_chunks:
        raise ScheduleError(
            f"{name} divides a rank's part of the model into {usual} chunk{'s' * (usual > 1)}, not {chunks}; "
            f"chunks = {usual} works, and so does interleaved with chunks = {chunks}"
        )
    return placement


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Make the schedule of validation: forward passes alone. Raises ScheduleError."""
    _check_sizes(placement, microbatches, MOST_SCHEDULED)
    work = orders.forward(placement, microbatches)
    return Schedule("forward-only", placement, microbatches, with_messages(placement, work))


def with_messages(placement: Placement, work: Work) -> tuple[tuple[Action, ...], ...]:
    """Add its messages to the work of each rank. Raises ScheduleError if the work cannot be done in this order."""
    rows: list[list[Done]] = [[] for _ in work]
    sent: set[Event] = set()  # the work whose output leaves its rank
    for done in clock(in_order(placement, work), lambda _, action: ORDER_DURATIONS[action.op]):
        rows[done.rank].append(done)
        if done.source and done.source[0] != done.rank:
            sent.add(done.source)
    return tuple(_row_with_messages(row, sent) for row in rows)


def _row_with_messages(row: Sequence[Done], sent: set[Event]) -> tuple[Action, ...]:
    receives: list[list[Action]] = [[] for _ in row]  # posted before each piece of work
    ends = [0.0, *(done.end for done in row)]
    for place, done in enumerate(row):
        if done.source and done.source[0] != done.rank:
            receives[posted_at(place, done.made, ends)].append(done.action.message(RECEIVES))
    actions: list[Action] = []
    due: list[Action] = []  # the send of the work before
    for done, posted in zip(row, receives, strict=True):
        actions += [*posted, *due, done.action]
        due = [done.action.message(SENDS)] if (done.rank, done.action) in sent else []
    return (*actions, *due)


def posted_at(place: int, made: float, free: Sequence[float]) -> int:
    """The place among a rank's pieces of work before which it posts the receive for the one at `place`.

    made: when the message leaves, at the earliest; free: when the rank can begin each of its pieces of work.
    """
    in_time = bisect_right(free, made) - 1  # the last piece of work before which is early enough
    return max(0, min(place - 1, in_time))


HEADER = ("schedule", "ranks", "chunks", "placement", "microbatches")
FORM = f"a line is one of {', '.join(HEADER)} with its value, 'rank 0:' and the rank's actions, or a comment after #"


def read_schedule(text: str) -> Schedule:
    """Read a schedule from text, as Schedule.text writes it; if there is no message in it, messages are added.

    Raises ScheduleError with line and word. That it runs to its end is for the checker to prove.
    """
    head: dict[str, tuple[int, str]] = {}  # key -> line number and value
    rows: list[tuple[int, str]] = []  # line number and actions of each rank
    for number, line in enumerate(text.splitlines(), start=1):
        if rank := re.match(r"\s*rank (\d{1,9}):", line, re.ASCII):
            if int(rank[1]) != len(rows):
                raise ScheduleError(f"line {number}: rank {int(rank[1])}, but rank {len(rows)} comes next")
            rows.append((number, line[rank.end() :]))
        elif line.strip() and not line.lstrip().startswith("#"):
            key, value = _key_value(number, line.strip(), head)
            head[key] = number, value
    if missing := [key for key in HEADER if key not in head]:
        raise ScheduleError(f"no line of the schedule says {' or '.join(missing)}; {FORM}")
    return _assembled(head, rows)


def _key_value(number: int, line: str, known: Collection[str]) -> tuple[str, str]:
    key, _, value = line.partition(" ")
    if key not in HEADER or key in known:
        raise ScheduleError(f"line {number}: {'a second ' if key in known else ''}{_short(key)}; {FORM}")
    return key, value.strip()


def _assembled(head: dict[str, tuple[int, str]], rows: list[tuple[int, str]]) -> Schedule:
    ranks, chunks, microbatches = (_count(key, *head[key]) for key in ("ranks", "chunks", "microbatches"))
    number, kind = head["placement"]
    if kind not in get_args(PlacementKind):
        raise ScheduleError(f"line {number}: placement {_short(kind)}; it is {' or '.join(get_args(PlacementKind))}")
    placement = Placement(ranks, chunks, cast(PlacementKind, kind))
    _check_sizes(placement, microbatches, MOST_SCHEDULED)
    actions = tuple(tuple(_actions(number, line, placement, microbatches)) for number, line in rows)
    schedule = Schedule(head["schedule"][1], placement, microbatches, actions)
    if schedule.work() == [list(row) for row in actions]:
        schedule = replace(schedule, actions=with_messages(placement, actions))
    return schedule


def _actions(number: int, line: str, placement: Placement, microbatches: int) -> Iterator[Action]:
    for place, word in enumerate(line.split(), start=1):
        try:
            action = Action.parse(word if len(word) < LONGEST_WORD else word[:LONGEST_WORD] + "...")
        except ValueError as error:
            raise ScheduleError(f"line {number}, word {place}: {error}") from error
        if wrong := _out_of_range(action, placement, microbatches):
            raise ScheduleError(f"line {number}, word {place}: {wrong}")
        yield action


def _count(key: str, number: int, value: str) -> int:
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ScheduleError(f"line {number}: {key} {_short(value)}; it is a number from 1")
    return int(value)


def _check_sizes(placement: Placement, microbatches: int, most: int = MOST_PASSES) -> None:
    sizes = {"ranks": placement.ranks, "chunks": placement.chunks, "microbatches": microbatches}
    if low := [f"{key} = {value}" for key, value in sizes.items() if value < 1]:
        raise ScheduleError(f"a schedule with {', '.join(low)} does not exist; the least is 1")
    if (passes := placement.stages * microbatches) > most:
        product = " x ".join(f"{value} {key}" for key, value in sizes.items())
        fewer = f", so {most // placement.stages} microbatches" if placement.stages <= most else ""
        raise ScheduleError(f"{product} = {passes} forward passes; valid: at most {most} of all ranks together{fewer}")


def _out_of_range(action: Action, placement: Placement, microbatches: int) -> str:
    """Say what is wrong with an action's numbers; empty if nothing is."""
    if not 0 <= action.microbatch < microbatches:
        return f"{action}, but microbatches go from 0 to {microbatches - 1}"
    if not 0 <= action.chunk < placement.chunks:
        return f"{action}, but chunks go from 0 to {placement.chunks - 1}"
    return ""


def _short(word: str) -> str:
    return repr(word if len(word) < LONGEST_WORD else word[:LONGEST_WORD] + "...")
