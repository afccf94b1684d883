"""The page that a preflight prints, and the same as JSON. Pure.

title: how many ranks and nodes, which job, how long
software, MPI                the same on all ranks, or else a finding says so
placement                    the tree of drawing.py
measured                     a line a measurement
found                        the worst first: what, where, how to mend it
verdict
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcllm.hardware.lists import list_text
from hpcllm.preflight.drawing import draw
from hpcllm.preflight.facts import Allocation, Library
from hpcllm.preflight.findings import Finding
from hpcllm.printable import printable

WIDTH = 110
BAD = ("breaks", "slow")
WORDS = {"breaks": "BREAKS", "slow": "SLOW", "note": "note"}


@dataclass(frozen=True)
class Measured:
    """What one measurement says."""

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

    def lines(self) -> Iterator[str]:
        yield from _title(self)
        yield ""
        yield from _rows(_software(self.allocation))
        yield ""
        yield from draw(self.allocation)
        if self.measured:
            yield ""
            yield from _rows([(one.name, one.text) for one in self.measured])
        if self.run:
            yield ""
            yield from _rows([("run file", self.run)])
        for finding in self.findings:
            yield ""
            yield from _finding(finding)
        yield ""
        yield self.verdict()

    def verdict(self) -> str:
        bad = [finding for finding in self.findings if finding.severity in BAD]
        notes = len(self.findings) - len(bad)
        also = f"; {notes} note{'s' if notes > 1 else ''}" if notes else ""
        if not bad:
            return f"fit to run{also}"
        return f"not fit to run: {len(bad)} finding{'s' if len(bad) > 1 else ''} to mend first{also}"

    def as_dict(self) -> dict[str, Any]:
        """{"fit", "ranks", "findings": [{severity, what, where, mend}], "nodes": [{name, ranks, kind, ...}],
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
    """As `train` says it."""
    return f"{finding.what} ({finding.where}); {finding.mend}"


def library_text(library: Library) -> str:
    """'MPICH 5.0.2, a wheel, THREAD_MULTIPLE, counts over 2^31'."""
    words = [library.version.partition(", package")[0]]
    words += ["a wheel"] if library.is_wheel else [f"from {library.file}"] if library.file else []
    counts = "counts over 2^31" if library.large_counts else "counts up to 2^31 (messages are cut to 2^30 anyway)"
    words += [f"THREAD_{library.threads}", counts, *(["reads device memory (GTL)"] if library.gpu_layer else [])]
    return ", ".join(words)


def _title(page: Page) -> Iterator[str]:
    ranks, nodes = page.allocation.size, len(page.allocation.nodes)
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    yield f"hpcllm preflight: {', '.join(filter(None, [where, page.job]))} (took {page.took_s:.1f} s)"


def _software(allocation: Allocation) -> list[tuple[str, str]]:
    first = allocation.first
    rows = [
        ("software", ", ".join(f"{name} {version}" for name, version in first.software)),
        ("MPI", library_text(first.library)),
        ("device", first.device.name if first.device else f"the CPU: {first.no_device}"),
    ]
    if first.environment:
        rows.append(("variables", " ".join(f"{name}={value}" for name, value in first.environment)))
    return rows


def _rows(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield from textwrap.wrap(
            printable(text), WIDTH, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2),
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip


def _finding(finding: Finding) -> Iterator[str]:
    rows = [(WORDS[finding.severity], finding.what), ("where", finding.where), ("mend", finding.mend)]
    yield from _rows([(name.rjust(6), text) for name, text in rows])


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
