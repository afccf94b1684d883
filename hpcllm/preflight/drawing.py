"""Ranks, cores, devices and network cards as a tree; nodes that are alike are drawn once. Pure.

n[1-2]: 2 nodes alike, ranks 0-7 of n1 are drawn
|- NUMA 0   cores 0-15   hsn0 25 GB/s
|  |- rank 0   cores 1-7    device 4   0000:d1:00.0
|  `- rank 1   cores 9-15   device 5   0000:d6:00.0
`- NUMA 1 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcllm.hardware.lists import list_text, nodes_text
from hpcllm.hardware.network import Nic
from hpcllm.preflight.facts import Allocation, Kind, RankFacts
from hpcllm.printable import size_text
from hpcllm.ranks import name_ranks

MOST_LINES = 16  # of ranks under a domain: with more, those that are alike in kind stand in one
MOST_KINDS = 6  # of nodes that are drawn
MOST_NAMES = 8


def draw(allocation: Allocation) -> Iterator[str]:
    kinds = allocation.kinds
    for kind in kinds[:MOST_KINDS]:
        yield from _node(kind)
    if len(kinds) > MOST_KINDS:
        rest = [name for kind in kinds[MOST_KINDS:] for name in kind.names]
        yield f"{nodes_text(rest, MOST_NAMES)}: {len(kinds) - MOST_KINDS} more kinds of nodes, see --json"


def _node(kind: Kind) -> Iterator[str]:
    hardware, first = kind.facts.hardware, kind.nodes[0]
    alike = f"{len(kind.nodes)} nodes alike, {name_ranks(first.ranks, 3)} of {first.name} are drawn"
    what = alike if len(kind.nodes) > 1 else name_ranks(first.ranks, 3)
    physical = len(hardware.topology.physical(hardware.topology.numbers))
    memory = size_text(hardware.memory.usable_bytes)
    yield f"{nodes_text(kind.names, MOST_NAMES)}: {what}; {hardware.processor}, {physical} cores, {memory}"
    branches = [*_domains(kind)]
    for index, (title, leaves) in enumerate(branches):
        last = index == len(branches) - 1
        yield f"{'`-' if last else '|-'} {title}"
        for number, leaf in enumerate(leaves):
            yield f"{'   ' if last else '|  '}{'`-' if number == len(leaves) - 1 else '|-'} {leaf}"


def _domains(kind: Kind) -> Iterator[tuple[str, list[str]]]:
    """(a NUMA domain, ranks in it); ranks that may run in several stand by themselves."""
    hardware = kind.facts.hardware
    topology = hardware.topology
    where = [topology.domains_of(facts.cores) for facts in kind.facts.ranks]
    for domain in topology.domains:
        cores = topology.of_domain(domain)
        nics = [nic for nic in hardware.nics if nic.numa == domain or (nic.numa is None and len(topology.domains) == 1)]
        places = [place for place, domains in enumerate(where) if domains == (domain,)]
        if cores or nics:
            title = "   ".join([f"NUMA {domain}", f"cores {list_text(cores) or 'none'}", *map(_nic, nics)])
            yield title, _ranks(kind, places)
    several = [place for place, domains in enumerate(where) if len(domains) != 1]
    if several:
        yield "several NUMA domains", _ranks(kind, several)
    lost = [nic for nic in hardware.nics if nic.numa is None] if len(topology.domains) > 1 else []
    if lost:
        yield "   ".join(["NUMA not known", *map(_nic, lost)]), []


def _nic(nic: Nic) -> str:
    rate = f" {nic.rate_gb_s:.3g} GB/s" if nic.rate_gb_s else ""
    return f"{nic.name}{rate}{'' if nic.up else ' DOWN'}"


def _ranks(kind: Kind, places: list[int]) -> list[str]:
    ranks, facts = kind.nodes[0].ranks, kind.facts.ranks
    alike: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        mine = facts[place]
        key: tuple[object, ...] = (mine.cores, mine.device) if mine.device else (mine.cores,)
        if len(places) > MOST_LINES and not mine.device:
            key = (len(mine.cores),)  # 'ranks 0-63   1 core each of 0-63'
        alike.setdefault(key, []).append(place)
    rows = [
        (name_ranks([ranks[p] for p in group], 3), _cores(kind, group), *_device(facts[group[0]]))
        for group in alike.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cores(kind: Kind, group: list[int]) -> str:
    found = [kind.facts.ranks[place].cores for place in group]
    if len(set(found)) > 1:
        every = list_text(core for cores in found for core in cores)
        return f"{len(found[0])} core{'s' if len(found[0]) > 1 else ''} each of {every}"
    together = "together " if len(group) > 1 else ""
    return f"{together}core{'s' if len(found[0]) > 1 else ''} {list_text(found[0])}"


def _device(facts: RankFacts) -> tuple[str, str]:
    if not facts.device:
        return "", ""
    device = facts.device
    near = "" if device.numa is None else f"NUMA {device.numa}"
    return f"device {device.index} of {device.visible}", "   ".join(filter(None, [device.address, near, device.name]))
