"""The page that a preflight prints, and the same as JSON. Pure.

title: how many ranks and nodes, which job, how long
software, MPI                the same on all ranks, or else a finding says so
placement                    a tree of ranks, cores, devices and network cards
measured                     a line a measurement
found                        the worst first: what, where, how to fix it
verdict

Nodes that are alike are drawn once:

n[1-2]: 2 nodes alike, ranks 0-7 of n1 are drawn
|- NUMA 0   cores 0-15   hsn0 25 GB/s
|  |- rank 0   cores 1-7    device 4   0000:d1:00.0
|  `- rank 1   cores 9-15   device 5   0000:d6:00.0
`- NUMA 1 ...
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcllm.mpi.rank_names import name_ranks
from hpcllm.preflight.facts import Allocation, Kind, Library, RankFacts
from hpcllm.preflight.findings import Finding
from hpcllm.system.hardware.pci_devices import Nic
from hpcllm.system.hardware.sysfs import list_text
from hpcllm.system.output import COLUMNS
from hpcllm.system.slurm import nodes_text
from hpcllm.system.text import counted, printable, size_text, table

BAD = ("breaks", "slow")
WORDS = {"breaks": "BREAKS", "slow": "SLOW", "note": "note"}


@dataclass(frozen=True)
class Measured:
    """Result of one measurement."""

    name: str
    text: str  # in a line
    facts: dict[str, Any]  # for --json; names carry the unit
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    allocation: Allocation
    job: str  # 'Slurm job 42, 59 min left', or ""
    findings: list[Finding]
    measured: list[Measured]
    run: str = ""  # what was checked of a run file, in a line
    took_s: float = 0.0

    @property
    def is_fit(self) -> bool:
        return not any(finding.severity in BAD for finding in self.findings)

    def lines(self, columns: int = COLUMNS) -> Iterator[str]:
        ranks, nodes = counted(self.allocation.size, "rank"), counted(len(self.allocation.nodes), "node")
        where = ", ".join(filter(None, [f"{ranks} on {nodes}", self.job]))
        blocks: list[Iterable[str]] = [
            [f"hpcllm preflight: {where} (took {self.took_s:.1f} s)"],
            _rows(_software(self.allocation), columns),
            draw(self.allocation),
            _rows([(one.name, one.text) for one in self.measured], columns),
            _rows([("run file", self.run)] if self.run else [], columns),
            *(_finding(finding, columns) for finding in self.findings),
            [self.verdict()],
        ]
        for number, block in enumerate(filter(None, map(list, blocks))):
            yield from ["", *block] if number else block

    def verdict(self) -> str:
        bad = sum(finding.severity in BAD for finding in self.findings)
        notes = len(self.findings) - bad
        also = f"; {counted(notes, 'note')}" if notes else ""
        return f"not fit to run: {counted(bad, 'finding')} to fix first{also}" if bad else f"fit to run{also}"

    def as_dict(self) -> dict[str, Any]:
        """{"fit", "ranks", "findings": [{severity, what, where, fix}], "nodes": [{name, ranks, kind, ...}],
        "kinds": [{hardware, ranks}], "measured": {name: {...}}}"""
        kinds = self.allocation.kinds
        return {
            "fit": self.is_fit,
            "ranks": self.allocation.size,
            "job": self.job or None,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "measured": {one.name: one.facts for one in self.measured},
            "nodes": [
                {"name": node.name, "ranks": node.ranks, "kind": number, **dataclasses.asdict(node.gauges)}
                for number, kind in enumerate(kinds)
                for node in kind.nodes
            ],
            "kinds": [_plain(dataclasses.asdict(kind.facts)) for kind in kinds],
            "took_s": round(self.took_s, 3),
        }


def one_line(finding: Finding) -> str:
    """One finding in a line, as `train` prints it."""
    return f"{finding.what} ({finding.where}); {finding.fix}"


def library_text(library: Library) -> str:
    """'MPICH 5.0.2, a wheel, THREAD_MULTIPLE, counts over 2^31'."""
    words = [library.version.partition(", package")[0]]
    words += ["a wheel"] if library.is_wheel else [f"from {library.file}"] if library.file else []
    counts = "counts over 2^31" if library.large_counts else "counts up to 2^31 (messages are cut to 2^30 anyway)"
    words += [f"THREAD_{library.threads}", counts, *(["reads device memory (GTL)"] if library.gpu_layer else [])]
    return ", ".join(words)


def _software(allocation: Allocation) -> list[tuple[str, str]]:
    first = allocation.first
    rows = [
        ("software", ", ".join(f"{name} {version}" for name, version in first.software)),
        ("MPI", library_text(first.library)),
        ("device", first.device.name if first.device else f"the CPU: {first.no_device}"),
    ]
    if first.freed_memory:
        rows.append(("freed memory", first.freed_memory))
    if first.environment:
        rows.append(("variables", " ".join(f"{name}={value}" for name, value in first.environment)))
    return rows


def _rows(rows: Sequence[tuple[str, str]], columns: int) -> Iterator[str]:
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        yield from textwrap.wrap(
            printable(text), columns, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2),
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def _finding(finding: Finding, columns: int) -> Iterator[str]:
    rows = [(WORDS[finding.severity], finding.what), ("where", finding.where), ("fix", finding.fix)]
    yield from _rows([(name.rjust(6), text) for name, text in rows], columns)


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Cores as the kernel writes them, not one object a hardware thread."""
    topology = facts["hardware"]["topology"]
    groups: dict[int, list[int]] = {}
    for core in topology["cores"]:
        groups.setdefault(core["numa"], []).append(core["number"])
    topology["cores"] = {f"numa {domain}": list_text(numbers) for domain, numbers in groups.items()}
    for rank in facts["ranks"]:
        rank["cores"] = list_text(rank["cores"])
        rank["environment"], rank["software"] = dict(rank["environment"]), dict(rank["software"])
    return facts


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
    for title, leaves in branches:
        fork, stem = ("|-", "|  ") if (title, leaves) != branches[-1] else ("`-", "   ")
        yield f"{fork} {title}"
        yield from (f"{stem}|- {leaf}" for leaf in leaves[:-1])
        yield from (f"{stem}`- {leaf}" for leaf in leaves[-1:])


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
    return table(rows[0], rows[1:], indent="", left=len(rows[0])) if rows else []


def _cores(kind: Kind, group: list[int]) -> str:
    found = [kind.facts.ranks[place].cores for place in group]
    if len(set(found)) > 1:
        every = list_text(core for cores in found for core in cores)
        return f"{counted(len(found[0]), 'core')} each of {every}"
    together = "together " if len(group) > 1 else ""
    return f"{together}core{'s' if len(found[0]) > 1 else ''} {list_text(found[0])}"


def _device(facts: RankFacts) -> tuple[str, str]:
    if not facts.device:
        return "", ""
    device = facts.device
    near = "" if device.numa is None else f"NUMA {device.numa}"
    return f"device {device.index} of {device.visible}", "   ".join(filter(None, [device.address, near, device.name]))
