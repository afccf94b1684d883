"""A bench for scenarios: a student's functions on forked ranks, and folders that begin with an older checkpoint.

base: step_9.ckpt --copy--> save of step 10, in some order, with some fault --> newest, load by a fresh process
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.course.lab import LawError
from hpcllm.course.labs.checkpoint import forked
from hpcllm.course.labs.checkpoint.scheduler import Fault, Run, run
from hpcllm.course.labs.checkpoint.states import State, compare, draw, path_of

OLD, NEW = 9, 10  # steps: in the order of text the other way round
VALUES = 60
MOST_POINTS = 44  # of the moments of death that are tried


@dataclass
class Bench:
    """A student's functions, and states to save with them."""

    student: Any
    folder: Path
    ranks: int
    random: random.Random
    base: Path = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        """Make the folder that every scenario begins with."""
        self.old, self.new, self.again = (draw(self.random, VALUES, self.ranks) for _ in range(3))
        self.small = draw(self.random, VALUES // 4, self.ranks)
        self.base = self.folder / "base"
        self.base.mkdir(parents=True)
        self.save(self.base, OLD, self.old, asks=False)

    def fresh(self) -> Path:
        """Copy the base."""
        self.made += 1
        folder = self.folder / f"{self.made}"
        shutil.copytree(self.base, folder)
        return folder

    def save(self, folder: Path, step: int, state: State, order: Sequence[int] = (), fault: Fault | None = None,
             asks: bool = True) -> Run:  # fmt: skip
        """Save on all ranks."""
        return run(self.ranks, lambda comm: self.student.save(comm, folder, step, state.parts(comm.rank)), order,
                   fault, asks)  # fmt: skip

    def newest(self, folder: Path, candidates: Sequence[tuple[int, State]]) -> tuple[int, str]:
        """Look at a folder by one process: number of the candidate that is there, or -1, and what was seen."""

        def look(comm: forked.GroupComm) -> tuple[int, str]:
            path = self.student.newest(folder)
            if path is None:
                return -1, "newest finds none"
            found, seen = self.student.load(comm, folder), ""
            for number, (step, state) in enumerate(candidates):
                try:
                    compare(found, step, state.arrays, f"{path.name}")
                except LawError as wrong:
                    seen = seen or wrong.shown
                else:
                    if path.name == path_of(folder, step).name:
                        return number, ""
                    seen = f"newest says {path.name}, load returns step {step}"
            return -1, seen

        end = run(1, look, asks=False).ends[0]
        if not end or end.how == "raised":
            return -1, f"newest or load raises {end.value if end else ''}"
        number, seen = end.value
        return int(number), str(seen)

    def check(self, folder: Path, ran: Run, told: str) -> None:
        """Look after something went wrong: old or new, whole, and new where a rank had returned. Raises LawError."""
        number, seen = self.newest(folder, [(NEW, self.new), (OLD, self.old)])
        if number and path_of(folder, NEW).exists():
            renamed = any(e.call.name in ("rename", "link") and e.call.target.endswith(".ckpt") for e in ran.events)
            raise LawError("renamed_early" if renamed else "no_temporary",
                           f"{told}: a file is named step_{NEW}.ckpt and is not whole")  # fmt: skip
        if number < 0:
            raise LawError("lost", f"{told}: the older checkpoint is not found, either: {seen}")
        if number and ran.returned():
            said = f"save had returned on rank {', '.join(map(str, ran.returned()))}, and there is no new checkpoint"
            raise LawError("returned_early", f"{told}: {said}")


def orders(ranks: int) -> Iterator[tuple[str, list[int]]]:
    """Yield orders in which one rank goes on before all others, or after them."""
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        yield f"rank {rank} of {ranks} ahead of the others", [rank, *others]
        if ranks > 2:
            yield f"rank {rank} of {ranks} behind the others", [*others, rank]


def written(ran: Run, rank: int) -> int:
    """Return the bytes that a rank has written."""
    return sum(len(event.call.data) for event in ran.events if event.rank == rank and event.call.name == "write")


def points(clean: Run, names: Sequence[str], drawn: random.Random) -> list[tuple[int, int, str]]:
    """List rank, index and name of calls, at most MOST_POINTS of them."""
    found = [
        (rank, index, call.name)
        for rank, calls in enumerate(clean.calls)
        for index, call in enumerate(calls)
        if call.name in names or not names
    ]
    return sorted(drawn.sample(found, MOST_POINTS)) if len(found) > MOST_POINTS else found
