"""Cores of a node: which are two threads of one, which share a cache, which memory is near.

package 0                                    what Linux calls a CPU, here and in batch systems' options a "core", is
|- NUMA 0 -- L3 -- core 0 (= 64)  core 1 ..  one hardware thread; two of them may be halves of one core that
|         `- L3 -- core 8 (= 72)  ...        computes. `physical` names a core by the lowest number of its threads.
`- NUMA 1 ...                                distance 10: near; 12, 32, ...: the kernel's cost of another domain
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from hpcllm.system.hardware.sysfs import MACHINE, Root

_CORES, _NODES = "sys/devices/system/cpu", "sys/devices/system/node"
NEAR = 10  # the distance of a domain to itself


@dataclass(frozen=True)
class Core:
    """Hardware thread, in the words of Linux a core."""

    number: int
    physical: int  # lowest number among the threads of this core
    numa: int
    package: int
    cache: int  # lowest number among those that share its last cache


@dataclass(frozen=True)
class Topology:
    cores: tuple[Core, ...]  # that are online, by number
    domains: tuple[int, ...] = (0,)  # NUMA domains, also those that have memory only
    distances: tuple[tuple[int, ...], ...] = ((NEAR,),)  # a row a domain

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(core.number for core in self.cores)

    def physical(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the physical cores of some hardware threads, each once."""
        wanted = set(numbers)
        return tuple(sorted({core.physical for core in self.cores if core.number in wanted}))

    def first_threads(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return one of the given hardware threads of each core, sorted by domain and number."""
        wanted, first = set(numbers), dict[int, Core]()
        for core in self.cores:
            if core.number in wanted:
                first.setdefault(core.physical, core)
        return tuple(core.number for core in sorted(first.values(), key=lambda core: (core.numa, core.number)))

    def domains_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        wanted = set(numbers)
        return tuple(sorted({core.numa for core in self.cores if core.number in wanted}))

    def of_domain(self, domain: int) -> tuple[int, ...]:
        return tuple(core.number for core in self.cores if core.numa == domain)

    def distance(self, one: int, other: int) -> int:
        """Return the distance of two domains; NEAR to itself, the largest known if the kernel does not say."""
        if one == other:
            return NEAR
        try:
            return self.distances[self.domains.index(one)][self.domains.index(other)]
        except (ValueError, IndexError):
            return max((cost for row in self.distances for cost in row), default=NEAR)


def find_topology(root: Root = MACHINE) -> Topology:
    """Read the topology of this node. Where the kernel says nothing: as many cores as Python counts, all near."""
    domains = _domains(root)
    numa = {core: domain for domain in domains for core in root.numbers(f"{_NODES}/node{domain}/cpulist")}
    online = root.numbers(f"{_CORES}/online")
    if not online:
        return Topology(tuple(Core(n, n, 0, 0, 0) for n in range(os.cpu_count() or 1)))
    cores = tuple(_core(root, number, numa.get(number, 0)) for number in online)
    rows = tuple(_row(root, domain) for domain in domains)
    return Topology(cores, domains or (0,), rows or ((NEAR,),))


def _domains(root: Root) -> tuple[int, ...]:
    names = (name.removeprefix("node") for name in root.names(_NODES) if name.startswith("node"))
    return tuple(int(name) for name in names if name.isdecimal())


def _row(root: Root, domain: int) -> tuple[int, ...]:
    return tuple(int(word) for word in root.text(f"{_NODES}/node{domain}/distance").split() if word.isdecimal())


def _core(root: Root, number: int, numa: int) -> Core:
    folder = f"{_CORES}/cpu{number}"
    siblings = root.numbers(f"{folder}/topology/thread_siblings_list")
    sharing = root.numbers(f"{folder}/cache/index3/shared_cpu_list")
    package = root.number(f"{folder}/topology/physical_package_id")
    return Core(number, min(siblings, default=number), numa, max(package or 0, 0), min(sharing, default=number))
