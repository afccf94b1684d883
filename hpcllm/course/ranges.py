"""A law of several labs: `own_range` of a student cuts n values into one range for each rank, in their order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcllm.course.lab import LawError, Trial

HINTS = {
    "inclusive": "The end is the first place that is no longer this rank's, as in Python's slices, not its last.",
    "length": "The second number is the end of the range, not its length.",
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
    follow = [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and min(sizes) >= 0
    if not follow or found[-1][1] != n:
        raise LawError(mistake(found, n, follow), said)
    if max(sizes) - min(sizes) > 1:
        raise LawError("uneven", said)


def mistake(found: Sequence[tuple[int, int]], n: int, follow: bool) -> str:
    """Tell a known mistake from the ranges of all ranks: key of the hint."""
    starts = [a for a, _ in found]
    if follow and n % len(found) and found[-1][1] < n:
        return "remainder"
    if [0, *(b + 1 for _, b in found)] == [*starts, n]:
        return "inclusive"
    return "length" if [a + length for a, length in found] == [*starts[1:], n] else "ranges"
