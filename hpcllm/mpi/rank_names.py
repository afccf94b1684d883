"""Sets of ranks in few words, and back: "rank 5", "ranks 0-511", "ranks 0-508 by 4, 511".

Messages for people name ranks this way, and who waits for whom is read out of the same words: what is said and what is
concluded cannot differ. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

_RUN = r"\d+(?:-\d+(?: by \d+)?)?"
_NAMED = re.compile(rf"\brank (\d+)|\branks ({_RUN}(?:, {_RUN})*)", re.ASCII)


def name_ranks(ranks: Iterable[int], most_runs: int | None = None) -> str:
    """Return 'ranks 0-2, 8'; with more than most_runs runs of equal distance: 'ranks 0-2, 8, ... (17 ranks)'."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs = list(_runs(ordered))
    if most_runs and len(runs) > most_runs:
        return f"ranks {', '.join(runs[:most_runs])}, ... ({len(ordered)} ranks)"
    return f"ranks {', '.join(runs)}"


def named_ranks(text: str) -> frozenset[int]:
    """Return all ranks that a text names as name_ranks does, or as in 'stage 2 (rank 5)'."""
    found: set[int] = set()
    for one, several in _NAMED.findall(text):
        for run in (one or several).split(", "):
            found.update(_range(run))
    return frozenset(found)


def without_ranks(text: str) -> str:
    """Return the text with 'rank *' where it names ranks: equal for waits of one kind."""
    return _NAMED.sub("rank *", text)


def _runs(ordered: Collection[int]) -> Iterator[str]:
    """Yield '0-2', '4-12 by 4', '20': greedy, a step other than 1 only from three ranks on."""
    rest = list(ordered)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        length = 1
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if length < 3 and step > 1:
            length = 1
        by = f" by {step}" if step > 1 else ""
        yield f"{rest[0]}-{rest[length - 1]}{by}" if length > 1 else str(rest[0])
        del rest[:length]


def _range(run: str) -> range:
    numbers = [int(number) for number in re.findall(r"\d+", run)]
    last = numbers[1] if len(numbers) > 1 else numbers[0]
    return range(numbers[0], last + 1, numbers[2] if len(numbers) > 2 else 1)
