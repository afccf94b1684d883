"""Where Slurm puts rank i by itself: srun --distribution, nodes of equal numbers of tasks.

    4 nodes' worth of 8 ranks, 2 a node      node 0   node 1   node 2   node 3
    block      node after node                0 1      2 3      4 5      6 7
    cyclic     one to each node in turn       0 4      1 5      2 6      3 7
    plane=n    n to each node in turn

Ranks of a node take its slots in ascending order. tests/slurm asks a real srun. Source: srun(1), --distribution.
"""

from __future__ import annotations

import numpy as np

from hpcllm.reorder.seats import Cost, Seating, Slots, Triple, cost, tiled
from hpcllm.reorder.traffic import Traffic


def rank_lists(slots: Slots) -> dict[str, list[int]]:
    """Option -> the rank in each slot; none if the last node would be part full, as Slurm then evens them out."""
    if slots.ranks % slots.per_node:
        return {}
    planes = [n for n in range(2, slots.per_node) if slots.per_node % n == 0]
    blocks = {"block": slots.per_node, "cyclic": 1} | {f"plane={n}": n for n in planes}
    return {option: _dealt(slots, block) for option, block in blocks.items()}


def _dealt(slots: Slots, block: int) -> list[int]:
    """Blocks of so many ranks dealt to the nodes in turn."""
    nodes = np.arange(slots.ranks) // block % (slots.ranks // slots.per_node)
    return [int(rank) for rank in np.argsort(nodes, kind="stable")]


def as_good(traffic: Traffic, slots: Slots, shape: Triple, order: str, goal: Cost) -> str:
    """The first option that costs no more than `goal`; empty: none."""
    place_of_rank: Seating = tiled(shape, order)
    for option, ranks in rank_lists(slots).items():
        if cost(traffic, place_of_rank[ranks], slots, shape) <= goal:
            return option
    return ""
