"""Messages between nodes and inside them: each with a few others, all pairs of a round at once.

    node 0   rank 0 <-> rank 4   node 1       ranks of the same place, both ways at the same time, so that each network
             rank 1 <-> rank 5                card of a node works; a node's bandwidth is the sum over its ranks

The best round of a node counts: with a sound partner it is as fast as it can be. In a few rounds each node has other
partners, so that a slow one stands out:

    8 nodes, 3 rounds: partner = own number with one bit turned
    round 1   0-1  2-3  4-5  6-7
    round 2   0-2  1-3  4-6  5-7          a slow node is slow in all of its rounds, its partners in one each
    round 3   0-4  1-5  2-6  3-7

Any other number of nodes: who has no partner waits; each node has one in some round, for turning its highest bit off
leads to a lower number.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.mpi import buffers
from hpcllm.mpi.wait import name_rank
from hpcllm.preflight.collect import Communicators
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import Finding, severity_of, slow_ones, without
from hpcllm.preflight.page import Measured
from hpcllm.system import device
from hpcllm.system.hardware.pci_devices import RDMA
from hpcllm.system.text import counted

SIZE_BYTES, PING_BYTES = 4 << 20, 8
PINGS, MOST_TIMES = 100, 64
BUDGET_S = 0.5  # of one round
TAG = 32702
LEAST_OF_CARDS = 0.25  # of the rate of a node's network cards; below it, messages do not go through them


@dataclass(frozen=True)
class Pair:
    """This rank and one other, of the same communicator."""

    comms: Communicators
    comm: MPI.Intracomm
    peer: int
    where: torch.device  # of the messages' memory

    def rate_and_latency(self) -> tuple[float, float]:
        """GB/s each way, both at once, and seconds of a small message. Collective over both. Raises StallError."""
        sizes = (PING_BYTES, SIZE_BYTES)
        small, large = (torch.zeros(2, size, dtype=torch.uint8, device=self.where) for size in sizes)
        device.synchronize(self.where)  # MPI knows no streams
        latency_s = self._time(small, PINGS)
        seconds = torch.tensor([[max(self._time(large, 1), 1e-6)], [0.0]], dtype=torch.float64)
        self._exchange(seconds)  # the slower rank's time counts for both
        times = min(max(int(BUDGET_S / float(seconds.max())), 1), MOST_TIMES)
        return SIZE_BYTES / self._time(large, times) / 1e9, latency_s

    def _time(self, memory: torch.Tensor, times: int) -> float:
        """Seconds of one exchange. memory: (2, bytes), to send and to receive."""
        self._exchange(memory)  # brings both here
        start_s = time.perf_counter()
        for _ in range(times):
            self._exchange(memory)
        return (time.perf_counter() - start_s) / times

    def _exchange(self, memory: torch.Tensor) -> None:
        requests = buffers.irecv(self.comm, memory[1], self.peer, TAG)
        requests += buffers.isend(self.comm, memory[0], self.peer, TAG)
        self.comms.waits.all(requests, lambda: f"a message from {name_rank(self.comm, self.peer)}")


def measure(comms: Communicators, where: torch.device, allocation: Allocation | None) -> list[Measured]:
    """Measure messages between nodes and inside them; the result is on rank 0. Collective over comms.world.

    where: memory of messages lies: on a device only if MPI reads that. Raises StallError.
    """
    peers, lanes, nodes = _open_peers(comms)
    largest = comms.world.allreduce(comms.node.size, MPI.MAX)
    between = _rounds(comms, peers if comms.node.rank < lanes else None, nodes, where)
    inside = _rounds(comms, comms.node, largest, where)
    peers.Free()
    if not allocation:
        return []
    memory = f"{where.type} memory"
    found = [judge_nodes(between, allocation, memory)] if nodes > 1 else []
    return found + ([_judge_inside(inside, memory)] if inside.size else [])


def _open_peers(comms: Communicators) -> tuple[MPI.Intracomm, int, int]:
    """(ranks of this place on all nodes, in the order of nodes; places that every node has; nodes). Collective."""
    lanes = comms.world.allreduce(comms.node.size, MPI.MIN)
    nodes = comms.world.allreduce(int(comms.leads))
    lowest = comms.node.bcast(comms.world.rank)
    return cast(MPI.Intracomm, comms.world.Split(comms.node.rank, lowest)), lanes, nodes


def _rounds(comms: Communicators, comm: MPI.Intracomm | None, most: int, where: torch.device) -> NDArray[np.float64]:
    """(ranks, rounds, 2) GB/s and seconds on rank 0, NaN where a rank had no partner. Collective over comms.world.

    comm: whose ranks are paired, None: this one waits. most: ranks of the largest comm.
    """
    turns = distances(most)
    mine = np.full((len(turns), 2), math.nan)
    for turn, distance in enumerate(turns):
        comms.arrive("to exchange messages")
        peer = partner(comm.rank, distance, comm.size) if comm else None
        if comm and peer is not None:
            mine[turn] = Pair(comms, comm, peer, where).rate_and_latency()
    comms.arrive("to have exchanged messages")
    table = np.empty((comms.world.size if comms.world.rank == 0 else 0, *mine.shape))
    comms.world.Gather(mine, table if comms.world.rank == 0 else None)
    return table


def judge_nodes(table: NDArray[np.float64], allocation: Allocation, memory: str) -> Measured:
    """table: of _rounds, between nodes. memory: of the messages, in words. Pure."""
    rows = [np.nansum(table[list(node.ranks), :, 0], axis=0) for node in allocation.nodes]
    rates = [max((float(total) for total in row if total > 0), default=math.nan) for row in rows]  # NaN: no partner
    latency_s = float(np.nanmedian(table[..., 1]))
    findings = []
    for which, share in slow_ones(rates):
        name = allocation.nodes[which].name
        what = f"node {name}: {100 * share:.0f} % slow in messages ({rates[which]:.3g} GB/s each way)"
        where, fix = f"node {name}, the best of its rounds", without(allocation, [name])
        findings.append(Finding(severity_of(share, rates), what, where, fix))
    usual = statistics.median(rates)
    findings += _missing_cards(allocation, usual)
    text = (
        f"{usual:.3g} GB/s each way of a node ({min(rates):.3g} to {max(rates):.3g}), {latency_s * 1e6:.3g} us a small "
        f"message; {len(rates)} nodes, {counted(table.shape[1], 'round')}, {memory}"
    )
    facts = {"gb_s": [round(rate, 4) for rate in rates], "latency_s": latency_s, "rounds": table.shape[1]}
    return Measured("between nodes", text, facts, findings)


def _missing_cards(allocation: Allocation, usual: float) -> list[Finding]:
    """Messages that are far slower than the network cards take another way."""
    nics = (node.facts.hardware.nics for node in allocation.nodes)
    line_gb_s = statistics.median(sum(n.rate_gb_s or 0.0 for n in node if n.kind in RDMA and n.up) for node in nics)
    if usual >= LEAST_OF_CARDS * line_gb_s:
        return []
    what = f"nodes exchange {usual:.3g} GB/s each way, but their network cards make {line_gb_s:.3g} GB/s"
    fix = "an MPI library built for this network; more ranks a node, each near a card of its own"
    return [Finding("slow", what, "between all nodes", fix)]


def _judge_inside(table: NDArray[np.float64], memory: str) -> Measured:
    rate, latency_s = (float(np.nanmedian(table[..., column])) for column in (0, 1))
    small = f"{latency_s * 1e6:.3g} us a small message"
    text = f"{rate:.3g} GB/s each way between two ranks, {small}, all pairs at once, {memory}"
    return Measured("inside nodes", text, {"gb_s": rate, "latency_s": latency_s, "rounds": table.shape[1]})


def distances(nodes: int) -> list[int]:
    """Distance of the partners of each round: 1, 2, 4, ... below the number of nodes."""
    return [1 << bit for bit in range((nodes - 1).bit_length())] if nodes > 1 else []


def partner(node: int, distance: int, nodes: int) -> int | None:
    """Partner of a node in the round of that distance; None: the node waits."""
    other = node ^ distance
    return other if other < nodes else None
