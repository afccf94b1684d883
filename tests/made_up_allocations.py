"""Allocations on machines that are not at hand, made up for the checks: whole, for a test to break one thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from made_up_nodes import MI250X

from hpcllm.preflight.facts import Allocation, Device, Gauges, Library, Node, NodeFacts, RankFacts
from hpcllm.system.hardware.node import Hardware, Memory
from hpcllm.system.hardware.pci_devices import Gpu, Nic
from hpcllm.system.hardware.sysfs import numbers
from hpcllm.system.hardware.topology import Core, Topology

GB = 10**9
CRAY = Library(
    version="MPI VERSION    : CRAY MPICH version 8.1.31.15", file="/opt/cray/pe/lib64/libmpi_gnu_123.so.12",
    is_wheel=False, threads="MULTIPLE", large_counts=True, gpu_layer=True,
)  # fmt: skip
WHEEL = Library(
    version="MPICH Version: 5.0.2", file="/venv/lib/libmpi.so.12", is_wheel=True, threads="MULTIPLE",
    large_counts=True, gpu_layer=False,
)  # fmt: skip
SOFTWARE = (("python", "3.11.7"), ("hpcllm", "0.1.0"), ("torch", "2.9.0"), ("numpy", "2.2.0"))
CRAY_VARIABLES = (
    ("CRAYPE_VERSION", "2.7.33"), ("HUGETLB_DEFAULT_PAGE_SIZE", "2M"), ("CXI_FORK_SAFE", "1"),
    ("MPICH_GPU_SUPPORT_ENABLED", "1"), ("OMP_NUM_THREADS", "7"), ("SLURM_CPUS_ON_NODE", "56"),
)  # fmt: skip
# cores of rank i on GCD i: OLCF, "Frontier User Guide"; LUMI, "Distribution and binding"
GCD_CORES = ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]


def topology(domains: int, cores: int, threads: int = 1, cache: int = 8) -> Topology:
    count = domains * cores
    every = (
        Core(n, n % count, n % count // cores, n % count // cores, n % count // cache * cache)
        for n in range(count * threads)
    )
    rows = tuple(tuple(10 if a == b else 12 for a in range(domains)) for b in range(domains))
    return Topology(tuple(every), tuple(range(domains)), rows)


def frontier(nodes: int = 2) -> Allocation:
    """8 ranks a node, each on its GCD and the cores near it."""
    gpus = {pci: numa for numa, both in MI250X.items() for pci in both}
    hardware = Hardware(
        "AMD EPYC 7A53 64-Core Processor",
        topology(4, 16, 2),
        Memory(512 * GB, 512 * GB, 0, 256 * GB),
        tuple(Gpu(pci, "amd", gpus[pci]) for pci in sorted(gpus)),
        tuple(Nic(f"cxi{n}", "slingshot", f"0000:0{n}:00.0", n, 25.0, True) for n in range(4)),
    )
    ranks = [
        RankFacts(
            cores=numbers(cores),
            library=CRAY,
            device=device(pci, gpus[pci], index, 8),
            environment=CRAY_VARIABLES,
            software=SOFTWARE,
        )
        for index, (cores, pci) in enumerate(zip(GCD_CORES, sorted(gpus), strict=True))
    ]
    return alike("frontier0", nodes, NodeFacts(hardware, tuple(ranks)), "slurm")


def perlmutter(nodes: int = 2) -> Allocation:
    """4 ranks a node on A100s, one a NUMA domain."""
    hardware = Hardware(
        "AMD EPYC 7763 64-Core Processor",
        topology(4, 16, 2),
        Memory(256 * GB, 256 * GB, 0, 128 * GB),
        tuple(Gpu(f"0000:{n}1:00.0", "nvidia", 3 - n) for n in range(4)),
        tuple(Nic(f"cxi{n}", "slingshot", f"0000:{n}2:00.0", 3 - n, 25.0, True) for n in range(4)),
    )
    variables = tuple((k, v) for k, v in CRAY_VARIABLES if k not in ("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE"))
    ranks = [
        RankFacts(
            cores=tuple(range(16 * (3 - n), 16 * (4 - n))),
            library=CRAY,
            device=device(f"0000:{n}1:00.0", 3 - n, n, 4),
            environment=variables,
            software=SOFTWARE,
        )
        for n in range(4)
    ]
    return alike("nid00", nodes, NodeFacts(hardware, tuple(ranks)), "slurm")


def laptop(ranks: int = 2, cores: int = 4) -> Allocation:
    """Ranks of MPICH's mpiexec, which binds nobody."""
    hardware = Hardware("laptop", topology(1, cores), Memory(16 * GB, 16 * GB, 0, 8 * GB), (), ())
    facts = RankFacts(
        cores=tuple(range(cores)), library=WHEEL, no_device="built for CPUs alone", environment=(), software=SOFTWARE
    )
    return alike("laptop", 1, NodeFacts(hardware, (facts,) * ranks), "mpich")


def device(pci: str, numa: int, index: int, visible: int) -> Device:
    return Device(
        kind="cuda", name="GPU", index=index, visible=visible, identity=pci, address=pci, numa=numa,
        memory_bytes=64 * GB,
    )  # fmt: skip


def alike(stem: str, nodes: int, facts: NodeFacts, launcher: str) -> Allocation:
    count = len(facts.ranks)
    gauges = Gauges(facts.hardware.memory.usable_bytes, facts.hardware.memory.shared_bytes, 1e9, 0.0)
    found = (
        Node(f"{stem}{n:03}" if nodes > 1 else stem, tuple(range(n * count, (n + 1) * count)), facts, gauges)
        for n in range(nodes)
    )
    return Allocation(tuple(found), launcher, nodes * count)


def with_ranks(
    allocation: Allocation, change: Callable[[int, RankFacts], RankFacts], nodes: Sequence[int] | None = None
) -> Allocation:
    """Other ranks on all nodes or on some; change: place and facts -> facts."""
    facts = allocation.nodes[0].facts
    ranks = tuple(change(place, rank) for place, rank in enumerate(facts.ranks))
    other = dataclasses.replace(facts, ranks=ranks)
    return _with(allocation, nodes, lambda node: dataclasses.replace(node, facts=other))


def with_variable(allocation: Allocation, name: str, value: str | None) -> Allocation:
    """On all ranks; None: not set."""

    def change(_: int, rank: RankFacts) -> RankFacts:
        rest = tuple(pair for pair in rank.environment if pair[0] != name)
        return dataclasses.replace(rank, environment=rest + (() if value is None else ((name, value),)))

    return with_ranks(allocation, change)


def with_hardware(allocation: Allocation, nodes: Sequence[int] | None = None, **changes: Any) -> Allocation:
    facts = allocation.nodes[0].facts
    other = dataclasses.replace(facts, hardware=dataclasses.replace(facts.hardware, **changes))
    return _with(allocation, nodes, lambda node: dataclasses.replace(node, facts=other))


def with_gauges(allocation: Allocation, nodes: Sequence[int], **changes: Any) -> Allocation:
    def change(node: Node) -> Node:
        return dataclasses.replace(node, gauges=dataclasses.replace(node.gauges, **changes))

    return _with(allocation, nodes, change)


def _with(allocation: Allocation, nodes: Sequence[int] | None, change: Callable[[Node], Node]) -> Allocation:
    chosen = range(len(allocation.nodes)) if nodes is None else nodes
    found = tuple(change(node) if number in chosen else node for number, node in enumerate(allocation.nodes))
    return dataclasses.replace(allocation, nodes=found)
