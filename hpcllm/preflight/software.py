"""Checks that all ranks run the same program. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hpcllm.preflight.facts import Allocation, Kind
from hpcllm.preflight.findings import Finding, on


def versions(allocation: Allocation) -> Iterator[Finding]:
    """Of packages, of the MPI library, and of hpcllm's own text."""
    usual = _usual(allocation)
    for kind in allocation.kinds:
        differing: dict[tuple[str, str], list[int]] = {}
        for place in range(len(kind.facts.ranks)):
            for name, version in _software(kind, place).items():
                if version != usual.get(name):
                    differing.setdefault((name, version), []).append(place)
        for (name, version), places in differing.items():
            yield Finding(
                "breaks",
                f"{name} is {version or 'missing'} there, and {usual.get(name) or 'missing'} on most ranks",
                on(kind, places),
                "one environment for all ranks: the same modules and the same Python, on a file system that all nodes "
                "see or copied anew to each (sbcast)",
            )


def faults(allocation: Allocation) -> Iterator[Finding]:
    """What could not be found out."""
    for kind, place, facts in allocation.everyone():
        if facts.fault:
            yield Finding("note", f"could not find out {facts.fault}", on(kind, [place]), "look at that rank's node")


def _usual(allocation: Allocation) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for kind in allocation.kinds:
        for place in range(len(kind.facts.ranks)):
            for name, version in _software(kind, place).items():
                counts.setdefault(name, Counter())[version] += len(kind.nodes)
    return {name: counter.most_common(1)[0][0] for name, counter in counts.items()}


def _software(kind: Kind, place: int) -> dict[str, str]:
    facts = kind.facts.ranks[place]
    found = dict(facts.software) | {"MPI": facts.library.version}
    return found | ({"hpcllm's source text (hash)": kind.facts.source} if kind.facts.source else {})


CHECKS = (versions, faults)
