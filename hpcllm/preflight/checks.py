"""All checks of an allocation; here those of nodes against each other, of their load, and of software. Pure.

facts -> placement.CHECKS, messages.CHECKS, the checks below -> findings, the worst first
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hpcllm.preflight import messages, placement
from hpcllm.preflight.facts import Allocation, Kind, Node
from hpcllm.preflight.findings import MOST_NODES, Finding, merged, on, ranks_a_node, without
from hpcllm.system.hardware.node import Hardware
from hpcllm.system.slurm import nodes_text
from hpcllm.system.text import size_text

SHARED_BYTES_A_RANK = 20 << 20  # of /dev/shm that an MPI library takes: 2 MiB with MPICH, 17 MiB with Open MPI
LATE_S = 1.0  # that a node's clock may be off
MEMORY_SHARE = 0.05  # by which nodes of one kind differ
BUSY_SHARE = 0.1  # of a node's cores that others may keep busy

# what should be the same on all nodes: name -> value; a number counts as more if it is larger
ASPECTS: dict[str, Callable[[Hardware], int]] = {
    "cores": lambda hardware: len(hardware.topology.physical(hardware.topology.numbers)),
    "GPUs": lambda hardware: len(hardware.gpus),
    "network cards that are up": lambda hardware: sum(nic.up for nic in hardware.nics),
    "MB/s of network cards": lambda hardware: round(sum(nic.rate_gb_s or 0 for nic in hardware.nics) * 1000),
}


def odd(allocation: Allocation) -> Iterator[Finding]:
    """Nodes that have less of something than most."""
    for aspect, value in ASPECTS.items():
        usual = _usual(allocation, value)
        for kind in allocation.kinds:
            found = value(kind.facts.hardware)
            if found < usual:
                yield Finding(
                    "slow",
                    f"{found} {aspect}, where most nodes have {usual}",
                    on(kind),
                    without(allocation, kind.names),
                )
    usual = _usual(allocation, lambda hardware: hardware.memory.usable_bytes)
    for kind in allocation.kinds:
        found = kind.facts.hardware.memory.usable_bytes
        if found < (1 - MEMORY_SHARE) * usual:
            what = f"{size_text(found)} of memory, where most nodes have {size_text(usual)}"
            yield Finding("note", what, on(kind), without(allocation, kind.names))


def uneven(allocation: Allocation) -> Iterator[Finding]:
    """Ranks that are not spread evenly: two-level sums use as many lanes as the smallest node has ranks."""
    counts = Counter(len(node.ranks) for node in allocation.nodes)
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        few = [node for node in allocation.nodes if len(node.ranks) != usual]
        ranks = ", ".join(f"{count} on {nodes}" for count, nodes in sorted(counts.items()))
        what = f"nodes have different numbers of ranks (ranks on nodes: {ranks})"
        yield Finding("note", what, _names(few), ranks_a_node(allocation, usual))


def twins(allocation: Allocation) -> Iterator[Finding]:
    """One host that MPI takes for several nodes."""
    hosts = Counter(node.name for node in allocation.nodes)
    split = [name for name, count in hosts.items() if count > 1]
    if split:
        what = "MPI takes ranks of one host for ranks of several nodes, and sends through the network between them"
        fix = "run all ranks of a host in one container, with its /dev/shm and process numbers shared"
        yield Finding("note", what, nodes_text(split, MOST_NODES), fix)


def shared_memory(allocation: Allocation) -> Iterator[Finding]:
    """/dev/shm, by what MPI itself takes there."""
    low = []
    for node in allocation.nodes:
        size, need = node.facts.hardware.memory.shared_bytes, SHARED_BYTES_A_RANK * len(node.ranks)
        if len(node.ranks) > 1 and size and node.gauges.shared_free_bytes < need:
            low.append(node)
    if low:
        free = min(node.gauges.shared_free_bytes for node in low)
        need = SHARED_BYTES_A_RANK * max(len(node.ranks) for node in low)
        what = f"/dev/shm has {size_text(free)} free, ranks of a node need about {size_text(need)}"
        fix = (
            "remove what killed runs left there (mpich_shm_*, sm_segment.*); a container takes --shm-size=1g, a host "
            "mount -o remount,size=..."
        )
        yield Finding("slow", what, _names(low), fix)


def clocks(allocation: Allocation) -> Iterator[Finding]:
    middle = statistics.median(node.gauges.unix_s for node in allocation.nodes)
    off = [node for node in allocation.nodes if abs(node.gauges.unix_s - middle) > LATE_S]
    if off:
        worst = max(off, key=lambda node: abs(node.gauges.unix_s - middle))
        what = f"clocks differ: {worst.name} is {worst.gauges.unix_s - middle:+.1f} s from most"
        yield Finding("note", what, _names(off), "time stamps in logs mislead; the site's NTP or chrony remedies it")


def busy(allocation: Allocation) -> Iterator[Finding]:
    """Other programs on the cores of the ranks."""
    loaded = []
    for node in allocation.nodes:
        cores = len({core for rank in node.facts.ranks for core in rank.cores})
        if node.gauges.others_cores > max(BUSY_SHARE * cores, 0.5):
            loaded.append((node.gauges.others_cores / cores, node))
    if loaded:
        share, worst = max(loaded, key=lambda pair: pair[0])
        kept = f"{worst.gauges.others_cores:.1f} of the {round(worst.gauges.others_cores / share)} cores of our ranks"
        what = f"other programs are running: on {worst.name} they keep {kept} busy"
        exclusive = "sbatch --exclusive" if allocation.launcher == "slurm" else "wait for them, or take other nodes"
        yield Finding("slow" if share >= 0.5 else "note", what, _names([node for _, node in loaded]), exclusive)


def cards_down(allocation: Allocation) -> Iterator[Finding]:
    """A fast network card that is down beside others that are up."""
    for kind in allocation.kinds:
        fast = [nic for nic in kind.facts.hardware.nics if nic.kind != "ethernet"]
        down = [nic.name for nic in fast if not nic.up]
        if down and len(down) < len(fast):
            what = f"{', '.join(down)} of {len(fast)} network cards {'is' if len(down) == 1 else 'are'} down"
            yield Finding("slow", what, on(kind), without(allocation, kind.names))


def _usual(allocation: Allocation, value: Callable[[Hardware], int]) -> int:
    counts: Counter[int] = Counter()
    for kind in allocation.kinds:
        counts[value(kind.facts.hardware)] += len(kind.nodes)
    return counts.most_common(1)[0][0]


def _names(nodes: Sequence[Node]) -> str:
    return nodes_text([node.name for node in nodes], MOST_NODES)


def versions(allocation: Allocation) -> Iterator[Finding]:
    """Versions of packages, of the MPI library and of hpcllm's own text that differ between ranks."""
    usual = _usual_software(allocation)
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
    """Facts that could not be found out."""
    for kind, place, facts in allocation.everyone():
        if facts.fault:
            yield Finding("note", f"could not find out {facts.fault}", on(kind, [place]), "look at that rank's node")


def _usual_software(allocation: Allocation) -> dict[str, str]:
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


CHECKS = (
    *placement.CHECKS, *messages.CHECKS,
    odd, uneven, twins, shared_memory, clocks, busy, cards_down,
    versions, faults,
)  # fmt: skip


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
