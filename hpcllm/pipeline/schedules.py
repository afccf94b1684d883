"""Pipeline schedules as data: what each rank does, in which order, its messages included.

    make_schedule("1f1b", ranks=2, microbatches=2)       orders.py: the work       posting.py: the messages

    rank 0: F0 RECV_B0 SEND_F0 F1 RECV_B1 SEND_F1 B0 B1
    rank 1: RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1

The engine runs it, the checker proves it, the clock times it, the drawing shows it. As text it can be kept, changed by
hand and read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import cast, get_args

from hpcllm.errors import ScheduleError
from hpcllm.pipeline import orders
from hpcllm.pipeline.actions import COMPUTE, Action
from hpcllm.pipeline.placement import Placement, PlacementKind
from hpcllm.pipeline.posting import with_messages

MOST_PASSES = 1 << 22  # microbatches x virtual stages; more would take minutes and gigabytes to plan
LONGEST = 40  # characters of a strange word that an error repeats


@dataclass(frozen=True)
class Schedule:
    """All microbatches and chunks are in range; the checker says whether it runs to its end. Raises ScheduleError."""

    name: str
    placement: Placement
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # of each rank, messages included

    def __post_init__(self) -> None:
        _check_sizes(self.placement, self.microbatches)
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

    def shape(self) -> dict[str, str | int]:
        """What a schedule says of itself, in texts, reports and traces: the keys of HEADER."""
        place = self.placement
        return dict(zip(HEADER, (self.name, place.ranks, place.chunks, place.kind, self.microbatches), strict=True))

    def text(self) -> str:
        """What read_schedule reads."""
        lines = [f"{key} {value}" for key, value in self.shape().items()]
        lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.actions)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Kind:
    """A schedule that has a name: who does what when, and for which chunks."""

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


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of a name in SCHEDULES; chunks None: the usual ones. Raises ScheduleError."""
    placement, work = make_work(name, ranks, microbatches, chunks)
    return Schedule(name, placement, microbatches, with_messages(placement, work))


def make_work(
    name: str, ranks: int, microbatches: int, chunks: int | None = None
) -> tuple[Placement, list[list[Action]]]:
    """The same without messages: what each rank computes, in its order. Raises ScheduleError."""
    placement = make_placement(name, ranks, microbatches, chunks)
    return placement, [list(SCHEDULES[name].order(placement, microbatches, rank)) for rank in range(ranks)]


def make_placement(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Placement:
    """Of the same, which says whether there is such a schedule. Raises ScheduleError."""
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {_short(name)}; there are {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    usual = kind.placement.chunks
    placement = replace(kind.placement, ranks=ranks, chunks=usual if chunks is None else chunks)
    _check_sizes(placement, microbatches)
    if placement.chunks != usual and not kind.any_chunks:
        raise ScheduleError(
            f"{name} divides a rank's part of the model into {usual} chunk{'s' * (usual > 1)}, not {chunks}; "
            f"chunks = {usual} works, and so does interleaved with chunks = {chunks}"
        )
    return placement


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Validation: nothing comes back. Raises ScheduleError."""
    _check_sizes(placement, microbatches)
    work = orders.forward(placement, microbatches)
    return Schedule("forward-only", placement, microbatches, with_messages(placement, work))


HEADER = ("schedule", "ranks", "chunks", "placement", "microbatches")
FORM = f"a line is one of {', '.join(HEADER)} with its value, 'rank 0:' and the rank's actions, or a comment after #"


def read_schedule(text: str) -> Schedule:
    """A schedule from text, as Schedule.text writes it; if there is no message in it, messages are added.

    Raises ScheduleError with line and word. The checker is yet to say whether it runs to its end.
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
    _check_sizes(placement, microbatches)
    actions = tuple(tuple(_actions(number, line, placement, microbatches)) for number, line in rows)
    schedule = Schedule(head["schedule"][1], placement, microbatches, actions)
    if schedule.work() == [list(row) for row in actions]:
        schedule = replace(schedule, actions=with_messages(placement, actions))
    return schedule


def _actions(number: int, line: str, placement: Placement, microbatches: int) -> Iterator[Action]:
    for place, word in enumerate(line.split(), start=1):
        try:
            action = Action.parse(word if len(word) < LONGEST else word[:LONGEST] + "...")
        except ValueError as error:
            raise ScheduleError(f"line {number}, word {place}: {error}") from error
        if wrong := _out_of_range(action, placement, microbatches):
            raise ScheduleError(f"line {number}, word {place}: {wrong}")
        yield action


def _count(key: str, number: int, value: str) -> int:
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ScheduleError(f"line {number}: {key} {_short(value)}; it is a number from 1")
    return int(value)


def _check_sizes(placement: Placement, microbatches: int) -> None:
    sizes = {"ranks": placement.ranks, "chunks": placement.chunks, "microbatches": microbatches}
    if low := [f"{key} = {value}" for key, value in sizes.items() if value < 1]:
        raise ScheduleError(f"a schedule with {', '.join(low)} does not exist; the least is 1")
    if placement.stages * microbatches > MOST_PASSES:
        asked = " x ".join(f"{value} {key}" for key, value in sizes.items())
        raise ScheduleError(f"{asked} is more than the {MOST_PASSES} forward passes that a schedule can have")


def _out_of_range(action: Action, placement: Placement, microbatches: int) -> str:
    """What is wrong with an action's numbers, or nothing."""
    if not 0 <= action.microbatch < microbatches:
        return f"{action}, but microbatches go from 0 to {microbatches - 1}"
    if not 0 <= action.chunk < placement.chunks:
        return f"{action}, but chunks go from 0 to {placement.chunks - 1}"
    return ""


def _short(word: str) -> str:
    return repr(word if len(word) < LONGEST else word[:LONGEST] + "...")
