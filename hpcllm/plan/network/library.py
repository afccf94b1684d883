"""Collectives and messages of the library that comes with a device: NCCL, RCCL, oneCCL. Not ours: others train with it.

    seconds = start + steps x hop + V x size x (ranks - 1) / ranks / bus bandwidth        V: 2 of an all-reduce, else 1

    ring     ranks - 1 steps a pass, over as many rings at once as there are NICs, each byte through a node's NICs once
    tree     an all-reduce, if that is sooner: up and down, log2 of the nodes
    short    words that carry their own flag: short steps, a small part of the bandwidth; long: the other way round

    bus bandwidth of a group: inside a node that of its links; between nodes its part of the NICs, if that is less

Sources: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md (bus bandwidth); github.com/NVIDIA/nccl, src/graph/tuning.cc
(a start of 7 to 14 us; steps of 1 to 3 us over NVLink and 3 to 14 us between nodes, by protocol). Pure.
"""

from __future__ import annotations

import math

from hpcllm.plan.machine import Links, Machine
from hpcllm.plan.network.topology import Spread, Way, crowded, neighbours_share

VOLUME = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
START_S = 9e-6  # a kernel's, with what it does before the first byte
# RCCL over 8 GCDs, 4 bytes to 1 MiB: 37 us and 10 GB/s of short words, then 95 us and 86 GB/s (perf/plan/network.md)
SHORT_PART = 1 / 8  # of the bandwidth, for short words
LONG_STEPS = 2.5  # times as long is a step with all of it
PROXY_S = 4e-6  # of a step between nodes: a thread of the host hands the NIC what the device has written


def collective_s(operation: str, size_bytes: float, group: Spread, machine: Machine) -> float:
    """Of a group that lies so on nodes, the others of its node at work, too. size_bytes: of the whole array."""
    if group.ranks == 1:
        return 0.0
    moved = VOLUME[operation] * size_bytes * (group.ranks - 1) / group.ranks
    steps_s, carry_s = _steps_s(operation, group, machine), moved / bus_gb_s(group, machine) / 1e9
    return START_S + min(steps_s + carry_s / SHORT_PART, LONG_STEPS * steps_s + carry_s)


def message_s(size_bytes: float, over: Way, machine: Machine, nodes: int) -> float:
    """nodes: of the whole job."""
    links, fabric = machine.links, machine.fabric
    if not over.senders:
        pair_gb_s = links.package_gb_s if over.in_package else links.pair_gb_s
        return START_S + links.latency_s + size_bytes / (links.message_share * pair_gb_s) / 1e9
    share = fabric.message_share * neighbours_share(fabric, nodes, over.nodes)
    rate_gb_s = share * min(rank_gb_s(machine), fabric.node_gb_s / over.senders)
    return START_S + fabric.latency_s + PROXY_S + size_bytes / rate_gb_s / 1e9


def bus_gb_s(group: Spread, machine: Machine) -> float:
    """What a rank of the group sends and receives at once, in a ring."""
    inside = inside_gb_s(group.most, group.in_package, machine.links) if group.most > 1 else math.inf
    if group.nodes == 1:
        return inside
    fabric = machine.fabric
    share = fabric.collective_share * neighbours_share(fabric, group.nodes, group.hop_nodes)
    nics_gb_s = min(fabric.node_gb_s / group.together, group.least * rank_gb_s(machine))
    return min(inside, nics_gb_s * share / crowded(fabric, group.nodes))


def inside_gb_s(ranks: int, in_package: bool, links: Links) -> float:
    """Of so many ranks of one node: few of them have few links to one another."""
    if in_package:
        return links.message_share * min(links.device_gb_s, (ranks - 1) * links.package_gb_s)
    return min(links.collective_gb_s, links.message_share * (ranks - 1) * links.pair_gb_s)


def rank_gb_s(machine: Machine) -> float:
    """Line rate of the NICs that a rank reaches by itself: one, or its part of a node's if there are more."""
    fabric = machine.fabric
    return fabric.nic_gb_s * max(1.0, fabric.nics_per_node / machine.device.per_node)


def _steps_s(operation: str, group: Spread, machine: Machine) -> float:
    near_s, far_s = machine.links.latency_s, machine.fabric.latency_s + PROXY_S
    if group.nodes == 1:
        return VOLUME[operation] * (group.ranks - 1) * near_s
    ring_s = VOLUME[operation] * ((group.ranks - group.nodes) * near_s + (group.nodes - 1) * far_s)
    if operation != "allreduce":
        return ring_s
    tree_s = 2.0 * ((group.most - 1) * near_s + math.ceil(math.log2(group.nodes)) * far_s)
    return min(ring_s, tree_s)
