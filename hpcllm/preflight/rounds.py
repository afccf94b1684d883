"""Who measures with whom: in a few rounds, each node has other partners, so that a slow one stands out. Pure.

    8 nodes, 3 rounds: partner = own number with one bit turned
    round 1   0-1  2-3  4-5  6-7
    round 2   0-2  1-3  4-6  5-7          a slow node is slow in all of its rounds, its partners in one each
    round 3   0-4  1-5  2-6  3-7

Any other number of nodes: who has no partner waits; each node has one in some round, for turning its highest bit off
leads to a lower number.
"""

from __future__ import annotations


def distances(nodes: int) -> list[int]:
    """Of each round: 1, 2, 4, ... below the number of nodes."""
    return [1 << bit for bit in range((nodes - 1).bit_length())] if nodes > 1 else []


def partner(node: int, distance: int, nodes: int) -> int | None:
    """Of a node in the round of that distance; None: it waits."""
    other = node ^ distance
    return other if other < nodes else None
