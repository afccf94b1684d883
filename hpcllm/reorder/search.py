"""The seating with the least bytes between nodes, and of those, between packages.

    1  the order that the run has; the five other mesh orders
    2  blocks: a node holds a box of places (dp x pp x tp), a package a box of that

           dp        node 0 | node 1        2 x 2 x 1 a node instead of 4 x 1 x 1 or 1 x 4 x 1: what of each axis
        pp [][]      [][]   | [][]          crosses is weighed against the others
           [][]      [][]   | [][]

    3  of a few ranks: while exchanging two of them helps, the best exchange

A later candidate has to be better, not as good: the order of the run wins a tie, then a mesh order, which needs no
file. So the answer is never worse than what was given. Tests hold it against all ways to fill nodes with up to 9 ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hpcllm.reorder.seats import ORDERS, Cost, Seating, Slots, Triple, cost, tiled
from hpcllm.reorder.traffic import Traffic

MOST_PLACES = 2_000_000  # of candidates that do not fill nodes: seconds of work
MOST_EXCHANGED = 16  # ranks


@dataclass(frozen=True)
class Found:
    seating: Seating
    cost: Cost
    order: str = ""  # the mesh.order that gives it; empty: none does


def given(traffic: Traffic, slots: Slots, shape: Triple, order: str) -> Found:
    """As the run has it: rank i in slot i."""
    seating = tiled(shape, order)
    return Found(seating, cost(traffic, seating, slots, shape), order)


def best(traffic: Traffic, slots: Slots, shape: Triple, order: str) -> Found:
    """The best that is found, `given` if nothing is better."""
    starts = [given(traffic, slots, shape, each) for each in (order, *ORDERS)]
    blocks = (Found(seating, cost(traffic, seating, slots, shape)) for seating in _in_blocks(slots, shape))
    found = min(itertools.chain(starts, blocks), key=_cost)  # the first of those that are as good
    if slots.ranks <= MOST_EXCHANGED:
        different = {start.cost: start for start in (found, *starts)}.values()
        found = min([found, *(_exchanged(traffic, slots, shape, start) for start in different)], key=_cost)
    return found


def _in_blocks(slots: Slots, shape: Triple) -> Iterator[Seating]:
    """Boxes that fill nodes and packages; where none does, boxes of all sizes in all orders, cut as they come."""
    if slots.ranks % slots.per_node == 0:
        for block in _boxes(shape, slots.per_node):
            yield from (tiled(shape, ORDERS[0], (block, part)) for part in _boxes(block, slots.per_package))
        return
    tiles = itertools.product(ORDERS, itertools.product(*map(_divisors, shape)))
    for order, box in itertools.islice(tiles, max(1, MOST_PLACES // slots.ranks)):
        yield tiled(shape, order, [(box[0], box[1], box[2])])


def _boxes(shape: Triple, volume: int) -> list[Triple]:
    """Of so many places, with sides that divide the shape's."""
    return [
        (dp, pp, volume // (dp * pp))
        for dp, pp in itertools.product(_divisors(shape[0]), _divisors(shape[1]))
        if volume % (dp * pp) == 0 and shape[2] % (volume // (dp * pp)) == 0
    ]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _exchanged(traffic: Traffic, slots: Slots, shape: Triple, found: Found) -> Found:
    """Two ranks of different packages change seats as long as that helps."""
    packages = slots.packages
    apart = [(a, b) for a, b in itertools.combinations(range(slots.ranks), 2) if packages[a] != packages[b]]
    while True:
        other = min((_with(traffic, slots, shape, found.seating, pair) for pair in apart), default=found, key=_cost)
        if not other.cost < found.cost:
            return found
        found = other


def _cost(found: Found) -> Cost:
    return found.cost


def _with(traffic: Traffic, slots: Slots, shape: Triple, seating: Seating, pair: tuple[int, int]) -> Found:
    changed = seating.copy()
    changed[list(pair)] = seating[list(reversed(pair))]
    return Found(changed, cost(traffic, changed, slots, shape))
