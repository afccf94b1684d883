"""Bus bandwidth, and the time that no algorithm can beat. Pure.

Bytes that the busiest rank must send or receive, for `size` as OSU counts it (arguments.py) and n ranks:

    allreduce       2 (n - 1) / n  size      out as parts of sums, back in as sums
    reduce_scatter    (n - 1) / n  size
    allgather         (n - 1)      size      from each other rank its part
    alltoall          (n - 1)      size
    broadcast, p2p                 size

bus bandwidth = these bytes / time: comparable over n and over operations, the numbers that nccl-tests prints (its
PERFORMANCE.md derives them; where it counts all ranks' parts as the size, the factor here has the n instead).
With several ranks on a node the link is the node's, and a node that adds up or keeps inside what it can must still pass
the same formula with nodes for n; for allgather and alltoall all of its ranks' share.
A codec of ratio r divides the bytes: bound = bytes / (r x link).
"""

from __future__ import annotations


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes past the busiest rank's link, over the size."""
    if ranks == 1:
        return 0.0
    factors = {
        "allreduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "allgather": ranks - 1,
        "alltoall": ranks - 1,
        "broadcast": 1,
        "p2p": 1,
    }
    return float(factors[operation])


def link_bytes(operation: str, size_bytes: int, ranks: int, nodes: int) -> float:
    """Bytes without a codec that the busiest link, a node's or on one node a rank's, carries in one direction."""
    if nodes == 1 or operation == "p2p":
        return bus_factor(operation, ranks) * size_bytes
    together = {"allgather": ranks / nodes, "alltoall": (ranks / nodes) ** 2}.get(operation, 1)
    return bus_factor(operation, nodes) * together * size_bytes


def bound_s(operation: str, size_bytes: int, ranks: int, nodes: int, ratio: float, link_gb_s: float) -> float:
    """Seconds below which no algorithm gets with a codec of that ratio; latency is not counted."""
    return link_bytes(operation, size_bytes, ranks, nodes) / (ratio * link_gb_s * 1e9)
