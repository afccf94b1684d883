"""Affinity of a rank: the cores that the launcher gave it, or its share of those that the node's ranks have together.

    launcher bound each rank                keep that                       srun -c 7 --cpu-bind=cores, Open MPI
    k ranks have the same cores to use      share them out                  mpiexec of MPICH, a container
        with devices                        each near its device's memory   NUMA domain of the device first
        a share of one core                 all of its NUMA domain's        a rank has threads that send and write, too
    more ranks than cores                   leave it to the kernel, one thread each

    cores 0-15, NUMA 0: 0-7, 1: 8-15    rank 0 on device 0 (NUMA 1): 8-11    rank 1 on device 1 (NUMA 1): 12-15
                                        rank 2 on device 2 (NUMA 0): 0-3     rank 3 on device 3 (NUMA 0): 4-7

Hardware threads that are halves of one core count as one: a share has one of each. `plan_affinity` is pure;
`set_affinity` applies it, before any thread is started that would keep the old cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from hpcllm.mpi.partition import chunk_range
from hpcllm.system.hardware.node import allowed_cores
from hpcllm.system.hardware.sysfs import list_text
from hpcllm.system.hardware.topology import Topology, find_topology

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Allowed:
    """Cores that one rank of a node starts with."""

    cores: tuple[int, ...]  # hardware threads that it may run on
    numa: int | None = None  # domain of its device, if it has one and that is known


@dataclass(frozen=True)
class Affinity:
    """Cores and threads of one rank."""

    cores: tuple[int, ...]  # hardware threads to run on
    threads: int  # to compute with
    why: str
    changed: bool = False  # True if the cores are others than before


def plan_affinity(allowed: Sequence[Allowed], topology: Topology) -> list[Affinity]:
    """Return the affinity of each rank of one node, in order. Pure."""
    sharing: dict[tuple[int, ...], list[int]] = {}
    for rank, own in enumerate(allowed):
        sharing.setdefault(own.cores, []).append(rank)
    found: dict[int, Affinity] = {}
    for cores, ranks in sharing.items():
        found.update(_share_out(cores, ranks, allowed, topology))
    return [found[rank] for rank in range(len(allowed))]


def set_affinity(node: MPI.Intracomm, numa: int | None = None) -> Affinity:
    """Run this process on its share of the node's cores, and PyTorch with as many threads. Collective over node.

    node: ranks that share a node. numa: domain of this rank's device. A number of threads in OMP_NUM_THREADS stays.
    """
    allowed = node.allgather(Allowed(allowed_cores(), numa))
    affinity = plan_affinity(allowed, find_topology())[node.rank]
    if affinity.changed:
        os.sched_setaffinity(0, affinity.cores)
    if not os.environ.get("OMP_NUM_THREADS"):
        import torch  # takes seconds, and is not needed to plan

        torch.set_num_threads(affinity.threads)
    return affinity


def set_affinity_of_job(world: MPI.Intracomm) -> Affinity:
    """Call set_affinity on all ranks of a job, whatever they compute on. Collective over world."""
    from mpi4py import MPI

    node = cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED, world.rank))
    affinity = set_affinity(node)
    node.Free()
    return affinity


def near_cores(allowed: Sequence[Allowed], topology: Topology, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return each rank's share of `cores`, near its device; at least as many cores as ranks, one thread of each."""
    near: dict[int, list[int]] = {}  # domain -> ranks whose device is there
    for rank, start in enumerate(allowed):
        near.setdefault(-1 if start.numa is None else start.numa, []).append(rank)
    own = {domain: [core for core in topology.of_domain(domain) if core in set(cores)] for domain in near}
    if any(len(own[domain]) < len(ranks) for domain, ranks in near.items()):
        return _cut(cores, len(allowed))  # some device is nowhere, or its domain has too few cores
    shares: list[tuple[int, ...]] = [()] * len(allowed)
    for domain, ranks in near.items():
        for rank, share in zip(ranks, _cut(own[domain], len(ranks)), strict=True):
            shares[rank] = share
    return shares


def _share_out(
    cores: tuple[int, ...], ranks: Sequence[int], allowed: Sequence[Allowed], topology: Topology
) -> dict[int, Affinity]:
    """Return the affinities of ranks that may use the same cores."""
    singles = topology.first_threads(cores)
    if len(ranks) == 1:
        return {ranks[0]: Affinity(cores, len(singles), "as the launcher bound it")}
    if len(singles) < len(ranks):
        why = f"{len(ranks)} ranks on {len(singles)} cores: left to the kernel"
        return dict.fromkeys(ranks, Affinity(cores, 1, why))
    found = {}
    for rank, share in zip(ranks, near_cores([allowed[rank] for rank in ranks], topology, singles), strict=True):
        if len(share) == 1:  # its threads would wait for each other
            share = tuple(c for c in singles if c in set(topology.of_domain(topology.domains_of(share)[0])))
            why, threads = "a share of one core: all of its NUMA domain", 1
        else:
            why, threads = f"its share of cores {list_text(cores)}", len(share)
        found[rank] = Affinity(share, threads, why, changed=share != cores and set(share) != set(singles))
    return found


def _cut(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Cut cores into runs of neighbours whose lengths differ by one at most."""
    ends = [chunk_range(len(cores), parts, part)[0] for part in range(parts)] + [len(cores)]
    return [tuple(cores[first:end]) for first, end in pairwise(ends)]
