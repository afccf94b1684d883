"""A law of several labs: `own_range` of a student cuts n values into one range for each rank, in their order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from hpcllm.course.lab import LawError, Trial

HINTS = {
    "remainder": "The last values belong to nobody where n does not divide by the ranks.",
    "ranges": "The ranges of the ranks have to follow one another from 0 to n, in the order of the ranks.",
    "uneven": "One rank has more than one value more than another: it will be the one that all wait for.",
}


def lengths(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield lengths to cut: some that divide and some that do not."""
    yield from ({"n": n} for n in dict.fromkeys((ranks, ranks + 1, 2 * ranks - 1, 0, 1, drawn.randrange(20, 300))))


def check_ranges(trial: Trial) -> None:
    """Compare the ranges of all ranks."""
    n, ranks = trial.case["n"], trial.comm.size
    start, end = map(int, trial.student.own_range(n, trial.comm))
    found = trial.control.allgather((start, end))
    sizes = [b - a for a, b in found]
    said = f"n = {n}, {ranks} ranks: own_range gives {', '.join(f'{a}:{b}' for a, b in found)}"
    if max(b for _, b in found) < n:
        raise LawError("remainder", said)
    if [a for a, _ in found] != [0, *(b for _, b in found[:-1])] or found[-1][1] != n or min(sizes) < 0:
        raise LawError("ranges", said)
    if max(sizes) - min(sizes) > 1:
        raise LawError("uneven", said)
