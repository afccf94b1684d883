"""All checks of facts, and what they find. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcllm.preflight import devices, messages, nodes, placement, software
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import Finding, merged

CHECKS = (*placement.CHECKS, *devices.CHECKS, *messages.CHECKS, *nodes.CHECKS, *software.CHECKS)


def check(allocation: Allocation) -> list[Finding]:
    """The worst first."""
    return merged(finding for each in CHECKS for finding in _made(each, allocation))


def _made(each: Callable[[Allocation], Iterator[Finding]], allocation: Allocation) -> Iterator[Finding]:
    """A check that fails on facts that nobody thought of is a finding as well."""
    try:
        yield from each(allocation)
    except Exception as error:
        name = getattr(each, "__name__", str(each))
        yield Finding(
            "note", f"the check `{name}` failed: {type(error).__name__}: {error}", "rank 0", "tell its authors"
        )
