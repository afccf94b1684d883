"""What is wrong with an allocation, in four parts: how bad, what, where, and the option that mends it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcllm.hardware.lists import nodes_text
from hpcllm.preflight.facts import Allocation, Kind
from hpcllm.ranks import name_ranks

Severity = Literal["breaks", "slow", "note"]
ORDER: tuple[Severity, ...] = ("breaks", "slow", "note")
MOST_NODES, MOST_RUNS = 8, 3  # named in a line


@dataclass(frozen=True)
class Finding:
    """breaks: a run would fail. slow: it would take a multiple of its time, or a good part of what is paid idles."""

    severity: Severity
    what: str
    where: str
    mend: str


def on(kind: Kind, places: Sequence[int] | None = None) -> str:
    """'ranks 0-3, 8-11 on n[1-2]': ranks of these places, or all, in nodes that are alike."""
    ranks = kind.ranks(range(len(kind.facts.ranks)) if places is None else places)
    return f"{name_ranks(ranks, MOST_RUNS)} on {nodes_text(kind.names, MOST_NODES)}"


def everywhere(allocation: Allocation) -> str:
    """'all ranks', of one that has more than one node."""
    return "all ranks" if allocation.size > 1 else f"rank 0 on {allocation.nodes[0].name}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; one finding where several differ in their place alone."""
    found: dict[tuple[Severity, str, str], Finding] = {}
    for one in findings:
        key = (one.severity, one.what, one.mend)
        before = found.get(key)
        found[key] = replace(one, where=f"{before.where}; {one.where}") if before else one
    return sorted(found.values(), key=lambda finding: ORDER.index(finding.severity))
