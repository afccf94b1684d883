"""A lab as data: what a student writes, the laws it must obey, the races it runs, what the student predicts. Pure.

    Lab -- laws         cases, small ones first, on 1 to 4 ranks, drawn from a hidden seed -> LawError(hint, case)
        -- races        seconds of the student's function and of ours, in turns          -> points by their ratio
        -- predictions  numbers in the student's file                                    -> points if measured so
        -- hints        the likely mistake -> what to look at

**To add a lab** make a folder `labs/NAME` with three files, and name it in catalogue.py; nothing else knows labs:

    checks.py   LAB = Lab(...), the checks below; its points add up to 100
    NAME.py     the file to fill in, copied by `start`: functions that raise NotImplementedError or are right but slow,
                and PREDICTIONS = {key: None, ...}
    sheet.md    the sheet, copied as well

A check is called on every rank of its communicator with a Trial, and raises LawError, which ends the stage; on another
rank it may be waiting for messages that never come. Whoever tells a known mistake from others raises LawError with the
key of its hint; the keys of GENERAL come by themselves, from crashes, hangs, requests and messages left over. A check
draws what it needs from `trial.random`, the same on all ranks, and speaks by `trial.ours`, of which the student's
function knows nothing. Points are given law by law, up to the first that does not hold; races and predictions count
only if all laws hold. A race yields its rows as they come: a row has seconds (or whatever is the less the better) of
the student's function and of ours, measured in turns, and, where there are any, of the library's and of a bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.course.watched import WatchedComm

POINTS = 100
RANKS = 4  # of a check
GENERAL = {
    "exception": "The function ended with this exception, in the line of your file that is shown, or in what that line "
    "calls.",
    "missing": "The file has to keep the names that it started with.",
    "unfinished": "Nothing is written there yet: replace `raise NotImplementedError`.",
    "deadlock": "Every rank waits for another one. Draw who sends to whom in which order: for each receive there has "
    "to be one send, of the same tag, and of two ranks that both send first with blocking calls neither comes to its "
    "receive.",
    "endless": "A loop does not end. Which condition ends it, and does that come true on this rank, too?",
    "crash": "A process of the check ended in the middle: by an exit of your file, by a signal, by the system because "
    "of a wrong address in compiled code or too much memory, or by MPI after an error.",
    "stopped": "A process of the check was stopped by a signal, and waits. Does your file send signals?",
    "tampered": "The file replaces a function that others use, too: the clock, the grader, Python itself. Give yours a "
    "name of its own; the check judges what your functions do.",
    "borrowed": "The file imports from hpcllm.course, which has what you are asked to write.",
    "files": "The files of the check are gone. Write only into a folder of your own.",
    "not_yours": "The communicator, MPI and the job belong to who called your function: it neither frees them nor ends "
    "them.",
    "memory": "It asks for much more memory than its input has. Is an array made in a loop, or one for each pair of "
    "ranks?",
    "not_waited": "A request of Isend or Irecv was never waited for: until its wait a send buffer must not change, and "
    "a receive buffer holds nothing yet.",
    "message_left": "A message was sent that nobody received. Count the sends to each rank and its receives.",
    "truncated": "A message was longer than the buffer that receives it: the two ranks do not agree on which part is "
    "sent in this step, or on its length.",
    "world": "The file uses MPI.COMM_WORLD. Use the communicator that is given: it may have fewer ranks, in another "
    "order.",
    "forbidden": "This call does what the lab is about; build it from sends and receives.",
    "slow": "Right, but slow beside ours. Is anything sent that nobody needs, sent one after another where it could go "
    "at once, or copied more often than needed?",
    "predicts": "A number in PREDICTIONS is not what is measured: look at its unit, and at what is counted.",
    "other": "The result is wrong. Take the case above by hand, step by step.",
}


class LawError(Exception):
    """A law that does not hold: key of the hint, and the failing case in one line."""

    def __init__(self, hint: str, shown: str) -> None:
        super().__init__(shown)
        self.hint, self.shown = hint, shown


@dataclass
class Trial:
    """Arguments of a check on each rank. Messages of the grader go by `control`, never by `comm`."""

    student: Any  # module that the student wrote
    ours: Any  # the lab's checks.py
    comm: WatchedComm
    control: MPI.Intracomm  # the same ranks
    random: random.Random  # the same numbers on all ranks
    folder: Path  # scratch, seen by all ranks
    case: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)  # of the races so far, by name


@dataclass(frozen=True)
class Law:
    """A law: `check` is called with each case of `cases` on each number of ranks. Raises LawError."""

    name: str
    about: str  # a sentence: what holds
    points: int
    cases: Callable[[random.Random, int], Iterable[Mapping[str, Any]]]  # (random, ranks) -> JSON, small ones first
    check: Callable[[Trial], None]
    ranks: tuple[int, ...] = (1, 2, 3, RANKS)
    limit_s: float = 8.0  # of a case, before it counts as hanging


@dataclass(frozen=True)
class Row:
    """Seconds, or another cost, of one size. All ranks have the same numbers."""

    label: str  # "1 MiB"
    x: float  # for the picture
    student: float
    ours: float
    native: float | None = None  # of the MPI library
    bound: float | None = None  # below which nobody comes

    @property
    def ratio(self) -> float:
        return self.student / self.ours


@dataclass(frozen=True)
class Race:
    """A measurement of the student's function beside ours; the median ratio of its rows decides on the points."""

    name: str
    about: str
    points: int
    measure: Callable[[Trial], Iterator[Row]]
    bands: tuple[tuple[float, float], ...]  # (ratio at most, share of the points), best first
    hint: str = "slow"
    x_label: str = "bytes"
    unit: str = "s"
    native_label: str = "the MPI library"
    against: str = "ours"  # what the student's numbers are held against
    both_ways: bool = False  # a number that is too small is as bad as one that is too large
    limit_s: float = 60.0  # of a row

    def ratio(self, row: Row) -> float:
        """Return what is judged of a row: times as much as ours, or off either way."""
        return max(row.ratio, 1 / row.ratio) if self.both_ways else row.ratio


@dataclass(frozen=True)
class Prediction:
    """A number that the student predicts: right if it is within a factor of what is measured."""

    key: str
    question: str
    points: int
    measure: Callable[[Trial], float]
    within: float = 1.0  # 1: exactly
    limit_s: float = 60.0


@dataclass(frozen=True)
class Lab:
    """One lab. Raises ValueError if its points do not add up."""

    number: int
    name: str  # of its folder, and of the student's file
    title: str
    functions: tuple[str, ...]  # that the file has to define
    laws: tuple[Law, ...]
    races: tuple[Race, ...]
    predictions: tuple[Prediction, ...]
    hints: Mapping[str, str]
    forbidden: tuple[str, ...] = ()  # methods of the communicator

    def __post_init__(self) -> None:
        parts: tuple[Law | Race | Prediction, ...] = (*self.laws, *self.races, *self.predictions)
        points = sum(part.points for part in parts)
        if points != POINTS:
            raise ValueError(f"the points of lab {self.name} add up to {points}, not to {POINTS}")

    def hint(self, key: str) -> str:
        """Return the words of a hint."""
        return self.hints.get(key) or GENERAL.get(key) or GENERAL["other"]
