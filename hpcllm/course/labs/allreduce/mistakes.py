"""Known mistakes of lab 2, made with arrays: what x would be on each rank, to be compared with what it is. Pure.

parts (ranks, n), whole numbers --> a ring with one fault, hop by hop --> (ranks, n) --> key of the hint
                                --> sums of some ranks only, of some twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcllm.mpi.partition import chunk_range

Values = NDArray[np.float32]
Combine = Callable[[Values, Values], Values]  # (own, received) -> what is there then


def added(own: Values, theirs: Values) -> Values:
    """Return the sum."""
    return own + theirs


def replaced(_: Values, theirs: Values) -> Values:
    """Return what came."""
    return theirs


def received_in_place(_: Values, theirs: Values) -> Values:
    """Return what comes of a receive into the chunk itself, which is added to itself then."""
    return theirs + theirs


@dataclass(frozen=True)
class Half:
    """One half of a ring: rank r sends chunk r + start - hop, and puts what comes into the chunk before that."""

    start: int
    combine: Combine
    hops: int = 0  # more than p - 1
    turned: bool = False  # messages go to the left, chunks as if they went to the right

    def run(self, chunks: Values) -> None:
        """Change the chunks (ranks, p, n / p) in place."""
        ranks = len(chunks)
        for hop in range(ranks - 1 + self.hops):
            sent = [chunks[rank, (rank + self.start - hop) % ranks].copy() for rank in range(ranks)]
            for rank in range(ranks):
                place = (rank + self.start - hop - 1) % ranks
                source = (rank + 1 if self.turned else rank - 1) % ranks
                chunks[rank, place] = self.combine(chunks[rank, place], sent[source])


RINGS = {  # key of the hint: the two halves
    "turned": [(Half(0, added, turned=True), Half(1, replaced, turned=True))],
    "in_place": [(Half(0, received_in_place), Half(1, replaced))],
    "lost_sums": [(Half(0, replaced), Half(1, replaced))],  # the same comes of a second half that starts with chunk r
    "twice": [(Half(0, added), Half(1, added))],
    "first_hops": [(Half(0, added, hops), Half(1, replaced)) for hops in (-1, 1)],
    "second_hops": [(Half(0, added), Half(1, replaced, -1))],
    "owner": [(Half(0, added), Half(start, replaced)) for start in (2, -1)],
}


def ring(parts: Values, first: Half, second: Half) -> Values:
    """Return x of all ranks (ranks, n) after such a ring; n is a multiple of the ranks."""
    ranks, n = parts.shape
    chunks = parts.reshape(ranks, ranks, n // ranks).copy()
    first.run(chunks)
    second.run(chunks)
    return chunks.reshape(ranks, n)


def mistake(x: Values, before: Values, parts: Values, rank: int) -> str:
    """Tell a known mistake of a ring from x on a rank: key of the hint."""
    ranks, n = parts.shape
    wanted = parts.sum(axis=0)
    if np.array_equal(x, before):
        return "few" if n < ranks else "nothing"
    if np.allclose(x, wanted / ranks):
        return "mean"
    if ranks > 2 and n % ranks == 0:  # two ranks do the same by many mistakes
        for key, rings in RINGS.items():
            if any(np.array_equal(x, ring(parts, *halves)[rank]) for halves in rings):
                return key
        wrong = np.flatnonzero(x != wanted)
        if len(wrong) == n - n // ranks and np.array_equal(x[wrong], before[wrong]):
            return "rebound"
    return _vague_mistake(x, before, parts)


def _vague_mistake(x: Values, before: Values, parts: Values) -> str:
    ranks, n = parts.shape
    wanted = parts.sum(axis=0)
    wrong = np.flatnonzero(x != wanted)
    if wrong[0] >= n - n % ranks and np.array_equal(x[wrong], before[wrong]):
        return "remainder"
    if is_partial(x, wrong, parts):
        return "incomplete"
    if np.all(x[wrong] > wanted[wrong]):
        return "twice"
    places = set(wrong.tolist())
    for chunk in range(ranks):
        start, end = chunk_range(n, ranks, chunk)
        if start < end and places.isdisjoint(range(start, end)):
            return "owner"
    return "other"


def small_mistake(x: Values, before: Values, parts: Values) -> str:
    """Tell a known mistake of a small sum: key of the hint."""
    wanted = parts.sum(axis=0)
    wrong = np.flatnonzero(x != wanted)
    if np.allclose(x, wanted / len(parts)):
        return "mean"
    if any(np.array_equal(x, 2 * part) for part in parts):
        return "in_place"
    if np.array_equal(x, before) or is_partial(x, wrong, parts):
        return "small_incomplete"
    return "small_twice" if np.all(x[wrong] > wanted[wrong]) else "other"


def is_partial(x: Values, wrong: NDArray[np.intp], parts: Values) -> bool:
    """Return True if each wrong place holds the sum of some ranks."""
    partial = [parts[list(ranks)].sum(axis=0) for ranks in subsets(len(parts))]
    return all(any(x[place] == some[place] for some in partial) for place in wrong)


def subsets(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of some but not all ranks."""
    for bits in range(1, (1 << ranks) - 1):
        yield tuple(rank for rank in range(ranks) if bits >> rank & 1)
