"""Slots and who sits in them. A slot is a place that the launcher starts a process in, node after node.

    ranks a node 4, a package 2        slot     0   1 | 2   3   #   4   5 | 6   7
    mesh.order "tp,dp,pp", 2 x 2 x 2   rank     0   1   2   3       4   5   6   7
                                       place  000 001 100 101     010 011 110 111     dp, pp, tp

A seating is an array: the place, dp x pp x tp counted with tp fastest, of who sits in each slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcllm.axes import AXES
from hpcllm.reorder.traffic import Homes, Traffic

Seating = NDArray[np.int64]  # (ranks,)
Triple = tuple[int, int, int]  # dp, pp, tp
ORDERS = tuple(",".join(order) for order in itertools.permutations(("tp", "dp", "pp")))  # the default one first


@dataclass(frozen=True)
class Slots:
    """The last node may be part full. per_node is a multiple of per_package."""

    ranks: int
    per_node: int
    per_package: int = 1

    @property
    def nodes(self) -> Homes:
        """(ranks,) the node of each slot."""
        return np.arange(self.ranks) // self.per_node

    @property
    def packages(self) -> Homes:
        """(ranks,) the package of each slot, counted through all nodes."""
        return np.arange(self.ranks) // self.per_package


def tiled(shape: Triple, order: str, blocks: Sequence[Triple] = ()) -> Seating:
    """Places block after block, those of a block block after block, and so on; fastest axis first, as in mesh.order.

    blocks: shapes, each dividing the one before it. Without any: the seating of mesh.order itself.
    """
    slowest_first = [AXES.index(axis) for axis in reversed(order.split(","))]
    places = np.arange(np.prod(shape)).reshape(shape).transpose(slowest_first)[None]
    for block in blocks:
        a, b, c = (block[axis] for axis in slowest_first)
        n, x, y, z = places.shape
        cut = places.reshape(n, x // a, a, y // b, b, z // c, c).transpose(0, 1, 3, 5, 2, 4, 6)
        places = cut.reshape(-1, a, b, c)
    return places.reshape(-1)


def homes(seating: Seating, of_slots: Homes, shape: Triple) -> Homes:
    """(dp, pp, tp): the home of each place, from that of each slot."""
    found = np.empty_like(of_slots)
    found[seating] = of_slots
    return found.reshape(shape)


def rank_list(seating: Seating, shape: Triple, order: str) -> list[int]:
    """The rank in each slot, if ranks are counted in mesh.order."""
    rank_of_place = np.empty_like(seating)
    rank_of_place[tiled(shape, order)] = np.arange(len(seating))
    return [int(rank) for rank in rank_of_place[seating]]


@dataclass(frozen=True, order=True)
class Cost:
    """Bytes a step of all kinds: between nodes, and between packages, those of different nodes included."""

    nodes: float
    packages: float


def cost(traffic: Traffic, seating: Seating, slots: Slots, shape: Triple) -> Cost:
    between = (traffic.crossing(homes(seating, of_slots, shape)) for of_slots in (slots.nodes, slots.packages))
    return Cost(*(round(sum(kinds.values())) for kinds in between))
