"""Place the ranks of a layout on nodes: how many of a group share a node, and how far apart neighbours are.

    order tp,dp,pp with tp = 2, dp = 4, pp = 2 on nodes of 8:      rank = tp + 2 dp + 8 pp

    node 0   0 1 2 3 4 5 6 7       tp groups  {0 1} {2 3} ...          inside a node, 4 of them on each
    node 1   8 9 ...               dp groups  {0 2 4 6} {1 3 5 7} ...  inside a node, 2
                                   pp         {0 8} {1 9} ...          between nodes, 8

All groups of a node that send at once share its NICs. Between nodes, a ring's neighbours are near one another and few
of them are in different groups of switches; partners of an exchange with everybody are anywhere. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Fabric

# Between two groups of a dragonfly there are few links, so traffic of one pair of groups takes detours through others:
# each byte crosses two of the links between groups. Kim and others 2008, "Technology-driven, highly-scalable dragonfly
# topology".
DETOUR = 2.0


@dataclass(frozen=True)
class Spread:
    """Distribution of a group's ranks over nodes; of several groups, the one that lies worst."""

    ranks: int
    nodes: int = 1
    most: int = 1  # ranks of the group on one node, at most
    least: int = 1  # and at least
    together: int = 1  # such groups of a node, which send at the same time
    hop_nodes: float = 0.0  # from a node of the group to its next one
    in_package: bool = False  # all ranks share one package


@dataclass(frozen=True)
class Way:
    """Path of a message: how many of a node's ranks send at once to other nodes, and how many nodes away."""

    senders: int  # 0: the message stays inside its node
    nodes: float
    in_package: bool = False


def stride(layout: Layout, axis: str) -> int:
    """Return the distance in ranks between two neighbours of a group along the axis."""
    step = 1
    for name in layout.order.split(","):
        if name == axis:
            return step
        step *= getattr(layout, name)
    raise KeyError(axis)


def spread(layout: Layout, axis: str, per_node: int, per_package: int) -> Spread:
    """Place the groups along "tp", "dp" or "pp" on nodes of per_node devices."""
    return _spread(getattr(layout, axis), stride(layout, axis), layout.devices, per_node, per_package)


@lru_cache(maxsize=4096)
def _spread(ranks: int, step: int, devices: int, per_node: int, per_package: int) -> Spread:
    block, here = ranks * step, min(per_node, devices)  # block: all ranks from the first of a group to the next group's
    if _fits(block, devices, per_node):
        in_package = _fits(block, devices, per_package)
        return Spread(ranks, 1, ranks, ranks, max(1, here // ranks), 0.0, in_package)
    most = min(ranks, -(-per_node // step))
    aligned = (block % per_node == 0 and per_node % step == 0) or step % per_node == 0
    if aligned:
        nodes = -(-ranks // most)
        return Spread(ranks, nodes, most, ranks // nodes, max(1, here // most), max(1.0, step / per_node))
    nodes = min(ranks, (block - step + per_node - 1) // per_node + 1)  # the first rank is the last one of its node
    return Spread(ranks, nodes, most, 1, max(1, here // most), max(1.0, step / per_node))


def _fits(block: int, devices: int, room: int) -> bool:
    """Return True if every block of consecutive ranks lies in one node (or package) of `room` devices."""
    return devices <= room or room % block == 0


def way(layout: Layout, source: int, target: int, per_node: int, per_package: int) -> Way:
    """Trace the messages from all ranks of pipeline rank `source` to those of `target`."""
    step = stride(layout, "pp")
    return way_between(source, target, layout.pp, step, per_node, per_package)


@lru_cache(maxsize=65536)
def way_between(source: int, target: int, stages: int, step: int, per_node: int, per_package: int) -> Way:
    """Trace the messages between two of `stages` pipeline ranks whose neighbours are `step` ranks apart."""
    first, distance = source * step, (target - source) * step  # all ranks of a node that send, send as far
    start, stage = first // per_node * per_node, first // step % stages
    mine = [rank for rank in range(start, start + per_node) if rank // step % stages == stage]
    senders = sum((rank + distance) // per_node != rank // per_node for rank in mine)
    in_package = all((rank + distance) // per_package == rank // per_package for rank in mine)
    return Way(senders, abs(distance) / per_node, in_package)


def neighbours_share(fabric: Fabric, nodes: int, hop_nodes: float) -> float:
    """Return the share of the line rate left where each of `nodes` nodes sends to the one hop_nodes further."""
    leaving = min(1.0, hop_nodes / fabric.group_nodes) if 0 < fabric.group_nodes < nodes else 0.0
    detour = DETOUR if "dragonfly" in fabric.topology else 1.0
    return min(1.0, fabric.group_taper / detour / leaving) if leaving else 1.0


def scattered_share(fabric: Fabric, nodes: int) -> float:
    """Return the share of the line rate left where each of `nodes` nodes sends to all others alike."""
    leaving = 1.0 - fabric.group_nodes / nodes if 0 < fabric.group_nodes < nodes else 0.0
    return min(1.0, fabric.group_taper / leaving) if leaving else 1.0


def congestion(fabric: Fabric, nodes: int) -> float:
    """Return the factor by which a collective over `nodes` nodes slows down as other jobs' traffic takes bandwidth."""
    return 1.0 + fabric.loss_per_doubling * math.log2(nodes)
