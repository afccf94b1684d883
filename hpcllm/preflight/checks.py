"""All checks of an allocation; here those of nodes against each other, of software, of MPI and what it is told. Pure.

    facts -> checks of the allocation, of each kind of node (placement.CHECKS too) -> findings, the worst first

Sources: Cray MPICH's man page intro_mpi (MPICH_*); fi_cxi(7) and fi_mr(3) of libfabric (FI_*); the user guides of OLCF
(Frontier) and LUMI for what harms and what helps there.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcllm.preflight import placement
from hpcllm.preflight.facts import Allocation, Kind, Node, RankFacts
from hpcllm.preflight.findings import (
    MOST_NODES,
    Fault,
    Finding,
    Severity,
    all_ranks_one_job,
    everywhere,
    merged,
    on,
    ranks_a_node,
    without,
)
from hpcllm.system.device import ALLOCATOR
from hpcllm.system.hardware.node import Hardware
from hpcllm.system.hardware.pci_devices import RDMA
from hpcllm.system.slurm import nodes_text
from hpcllm.system.text import size_text

SHARED_BYTES_A_RANK = 20 << 20  # of /dev/shm that an MPI library takes: 2 MiB with MPICH, 17 MiB with Open MPI
LATE_S = 1.0  # that a node's clock may be off
MEMORY_SHARE = 0.05  # by which nodes of one kind differ
BUSY_SHARE = 0.1  # of a node's cores that others may keep busy
ENOUGH_LOCKED = 64 << 20  # bytes: below that a network card cannot register the buffers of a few messages
FEW_FILES, SOME_FILES = 256, 1024  # that may be open at once: MPI over TCP opens one a peer, a store some, Python some

# what should be the same on all nodes: name -> value; a number counts as more if it is larger
ASPECTS: dict[str, Callable[[Hardware], int]] = {
    "cores": lambda hardware: len(hardware.topology.physical(hardware.topology.numbers)),
    "GPUs": lambda hardware: len(hardware.gpus),
    "network cards that are up": lambda hardware: sum(nic.up for nic in hardware.nics),
    "MB/s of network cards": lambda hardware: round(sum(nic.rate_gb_s or 0 for nic in hardware.nics) * 1000),
}
OTHER_MONITOR = "unset it, or kdreg2 (Frontier), userfaultfd (LUMI)"
# where it matters ("": anywhere), variable, value ("": not set), how bad, what, fix
VARIABLES: tuple[tuple[str, str, str, Severity, str, str], ...] = (
    ("", "FI_MR_CACHE_MONITOR", "memhooks", "slow",  # how libfabric notices that registered memory was freed
     "FI_MR_CACHE_MONITOR=memhooks can deadlock in the allocator", OTHER_MONITOR),
    ("", "FI_MR_CACHE_MONITOR", "disabled", "slow",
     "FI_MR_CACHE_MONITOR=disabled registers memory anew for each message", OTHER_MONITOR),
    ("", "FI_CXI_RDZV_PROTO", "alt_read", "note",
     "FI_CXI_RDZV_PROTO=alt_read suits RCCL, and may slow MPI",
     "unset it: hpcllm sends by MPI alone (module unload rccl-net-plugin)"),
    ("cray", "HUGETLB_DEFAULT_PAGE_SIZE", "", "note",
     "no huge pages: the network card looks up 4 KiB pages of large messages one by one",
     "module load craype-hugepages2M, when building and running"),
    ("slingshot", "CXI_FORK_SAFE", "", "note",
     "CXI_FORK_SAFE is not set: a library that forks (hpcllm does not) would corrupt messages",
     "export CXI_FORK_SAFE=1 CXI_FORK_SAFE_HP=1"),
)  # fmt: skip


def one_job(allocation: Allocation) -> Iterator[Finding]:
    if allocation.size == 1 and allocation.launched > 1:
        library = f"the library ({allocation.first.library.version})"
        alone = f"{allocation.launched} ranks were started, but each is alone in its MPI"
        what = f"{alone}: {library} does not hear the launcher"
        yield Finding("breaks", what, everywhere(allocation), all_ranks_one_job(allocation))


def odd(allocation: Allocation) -> Iterator[Finding]:
    """Nodes that have less of something than most."""
    for aspect, value in ASPECTS.items():
        usual = _usual((kind, value(kind.facts.hardware)) for kind in allocation.kinds)
        for kind in allocation.kinds:
            if (found := value(kind.facts.hardware)) < usual:
                what = f"{found} {aspect}, where most nodes have {usual}"
                yield Finding("slow", what, on(kind), without(allocation, kind.names))
    usual = _usual((kind, kind.facts.hardware.memory.usable_bytes) for kind in allocation.kinds)
    for kind in allocation.kinds:
        if (found := kind.facts.hardware.memory.usable_bytes) < (1 - MEMORY_SHARE) * usual:
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
    if split := [name for name, count in hosts.items() if count > 1]:
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
        larger = "a container takes --shm-size=1g, a host mount -o remount,size=..."
        fix = f"remove what killed runs left there (mpich_shm_*, sm_segment.*); {larger}"
        yield Finding("slow", what, _names(low), fix)


def clocks(allocation: Allocation) -> Iterator[Finding]:
    middle = statistics.median(node.gauges.unix_s for node in allocation.nodes)
    if off := [node for node in allocation.nodes if abs(node.gauges.unix_s - middle) > LATE_S]:
        worst = max(off, key=lambda node: abs(node.gauges.unix_s - middle))
        what = f"clocks differ: {worst.name} is {worst.gauges.unix_s - middle:+.1f} s from most"
        yield Finding("note", what, _names(off), "time stamps in logs mislead; the site's NTP or chrony remedies it")


def busy(allocation: Allocation) -> Iterator[Finding]:
    """Other programs on the cores of the ranks."""
    loaded = []
    for node in allocation.nodes:
        cores = len({core for rank in node.facts.ranks for core in rank.cores})
        if node.gauges.others_cores > max(BUSY_SHARE * cores, 0.5):
            loaded.append((node.gauges.others_cores / cores, cores, node))
    if loaded:
        share, cores, worst = max(loaded, key=lambda row: row[0])
        kept = f"{worst.gauges.others_cores:.1f} of the {cores} cores of our ranks"
        what = f"other programs are running: on {worst.name} they keep {kept} busy"
        exclusive = "sbatch --exclusive" if allocation.launcher == "slurm" else "wait for them, or take other nodes"
        yield Finding("slow" if share >= 0.5 else "note", what, _names([node for *_, node in loaded]), exclusive)


def versions(allocation: Allocation) -> Iterator[Finding]:
    """Versions of packages, of the MPI library and of hpcllm's own text that differ between ranks."""
    software = [(kind, [_software(kind, rank) for rank in kind.facts.ranks]) for kind in allocation.kinds]
    names = dict.fromkeys(name for _, ranks in software for rank in ranks for name in rank)
    usual = {name: _usual((k, r[name]) for k, ranks in software for r in ranks if name in r) for name in names}
    fix = (
        "one environment for all ranks: the same modules and the same Python, on a file system that all nodes see or "
        "copied anew to each (sbcast)"
    )
    for kind, ranks in software:
        differing: dict[tuple[str, str], list[int]] = {}
        for place, rank in enumerate(ranks):
            for pair in rank.items() - usual.items():
                differing.setdefault(pair, []).append(place)
        for (name, version), places in differing.items():
            what = f"{name} is {version or 'missing'} there, and {usual[name] or 'missing'} on most ranks"
            yield Finding("breaks", what, on(kind, places), fix)


def threads(allocation: Allocation) -> Iterator[Finding]:
    level = allocation.first.library.threads
    if level != "MULTIPLE":
        what = f"MPI gives THREAD_{level}: sums are not hidden behind the computation"
        fix = "an MPI library built for THREAD_MULTIPLE; Cray MPICH: do not set MPICH_MAX_THREAD_SAFETY below multiple"
        yield Finding("note", what, everywhere(allocation), fix)


def cards_down(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """A fast network card that is down beside others that are up."""
    fast = [nic for nic in kind.facts.hardware.nics if nic.kind != "ethernet"]
    down = [nic.name for nic in fast if not nic.up]
    if down and len(down) < len(fast):
        what = f"{', '.join(down)} of {len(fast)} network cards {'is' if len(down) == 1 else 'are'} down"
        yield "slow", what, None, without(allocation, kind.names)


def unknown(_: Allocation, kind: Kind) -> Iterator[Fault]:
    """Facts that could not be found out."""
    for place, facts in enumerate(kind.facts.ranks):
        if facts.fault:
            yield "note", f"could not find out {facts.fault}", [place], "look at that rank's node"


def wheel(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """A library from PyPI knows shared memory and TCP, and the fast network of such a machine is not used."""
    fast = [nic for nic in kind.facts.hardware.nics if nic.kind in RDMA and nic.up]
    bad = _places(kind, lambda facts: facts.library.is_wheel)
    if bad and fast and (fast[0].kind == "slingshot" or allocation.first.variable("CRAYPE_VERSION")):
        what = f"MPI is a wheel of PyPI's, which does not know {fast[0].kind} ({fast[0].name})"
        fix = "build mpi4py against the system's MPI: MPICC='cc -shared' pip install --no-binary=mpi4py mpi4py"
        yield _between_nodes(allocation), what, bad, fix


def unaware(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Cray MPICH reads device memory by a library of its own, which has to be linked and switched on."""
    if not allocation.first.library.is_cray:
        return
    enabled = _places(kind, lambda facts: facts.variable("MPICH_GPU_SUPPORT_ENABLED") == "1")
    if unlinked := [place for place in enabled if not kind.facts.ranks[place].library.gpu_layer]:
        what = "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_* is not loaded: MPI reads device memory and fails"
        modules = "build mpi4py with the modules of the GPU loaded (craype-accel-amd-gfx90a and rocm)"
        fix = f"{modules}, or LD_PRELOAD=${{CRAY_MPICH_ROOTDIR}}/gtl/lib/libmpi_gtl_hsa.so"
        yield "breaks", what, unlinked, fix
    if off := _places(kind, lambda rank: bool(rank.device) and rank.variable("MPICH_GPU_SUPPORT_ENABLED") != "1"):
        what = "ranks have devices, and MPI is not told to read their memory: each message is copied to the host"
        yield _between_nodes(allocation), what, off, "export MPICH_GPU_SUPPORT_ENABLED=1"


def segments(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """PyTorch's expandable segments, mapped page by page: no process can open such memory of another's by a handle."""
    if allocation.size == 1:
        return
    for name in ALLOCATOR:
        ranks = enumerate(kind.facts.ranks)
        if bad := [place for place, rank in ranks if rank.device and expands(rank.variable(name))]:
            what = f"{name} has expandable_segments: MPI (UCX, IPC) cannot map such device memory into another process"
            fix = f"leave it out of {name}; or communication.gpu_aware = 'no', for messages through the host"
            yield "slow", what, bad, fix


def expands(setting: str) -> bool:
    """True if this text for PyTorch's allocator turns expandable segments on; of several words the last one counts."""
    words = [word.strip().lower().partition(":") for word in setting.split(",")]
    values = [value.strip() for key, _, value in words if key.strip() == "expandable_segments"]
    return values[-1:] == ["true"]


def variables(_: Allocation, kind: Kind) -> Iterator[Fault]:
    """Settings that harm; those of RCCL, which hpcllm does not use, may harm MPI."""
    ranks, everyone = kind.facts.ranks, range(len(kind.facts.ranks))
    slingshot = any(nic.kind == "slingshot" for nic in kind.facts.hardware.nics)
    cray = _places(kind, lambda rank: bool(rank.variable("CRAYPE_VERSION")))
    matters = {"": everyone, "cray": cray, "slingshot": everyone if slingshot else ()}
    for where, name, value, severity, what, fix in VARIABLES:
        if bad := [place for place in matters[where] if ranks[place].variable(name) == value]:
            yield severity, what, bad, fix


def locked_memory(_: Allocation, kind: Kind) -> Iterator[Fault]:
    low = _places(kind, lambda facts: facts.locked_bytes < ENOUGH_LOCKED)
    if low and any(nic.kind in RDMA and nic.up for nic in kind.facts.hardware.nics):
        kib = kind.facts.ranks[low[0]].locked_bytes >> 10
        what = f"only {kib} KiB of memory may be locked (ulimit -l), too little for the network card"
        fix = "ulimit -l unlimited in the job script; if that is refused, the site sets it (PropagateResourceLimits)"
        yield "breaks", what, low, fix


def open_files(_: Allocation, kind: Kind) -> Iterator[Fault]:
    if low := _places(kind, lambda facts: facts.open_files < SOME_FILES):
        count = min(kind.facts.ranks[place].open_files for place in low)
        severity: Severity = "breaks" if count < FEW_FILES else "note"
        yield severity, f"a process may open {count} files (ulimit -n)", low, "ulimit -n 65536 in the job script"


def _places(kind: Kind, bad: Callable[[RankFacts], bool]) -> list[int]:
    return [place for place, facts in enumerate(kind.facts.ranks) if bad(facts)]


def _between_nodes(allocation: Allocation) -> Severity:
    """Severity of slow messages between nodes."""
    return "slow" if len(allocation.nodes) > 1 else "note"


def _usual(values: Iterator[tuple[Kind, Any]]) -> Any:
    """The value that most nodes have, or most ranks."""
    counts: Counter[Any] = Counter()
    for kind, value in values:
        counts[value] += len(kind.nodes)
    return counts.most_common(1)[0][0]


def _names(nodes: Sequence[Node]) -> str:
    return nodes_text([node.name for node in nodes], MOST_NODES)


def _software(kind: Kind, facts: RankFacts) -> dict[str, str]:
    found = dict(facts.software) | {"MPI": facts.library.version}
    return found | ({"hpcllm's source text (hash)": kind.facts.source} if kind.facts.source else {})


CHECKS: tuple[Callable[[Allocation], Iterator[Finding]], ...] = (
    one_job, odd, uneven, twins, shared_memory, clocks, busy, versions, threads,
)  # fmt: skip
NODE_CHECKS: tuple[Callable[[Allocation, Kind], Iterator[Fault]], ...] = (
    *placement.CHECKS, wheel, unaware, segments, variables, locked_memory, open_files, cards_down, unknown,
)  # fmt: skip


def check(allocation: Allocation) -> list[Finding]:
    """The worst first."""
    every: tuple[Callable[..., Any], ...] = (*CHECKS, *NODE_CHECKS)
    return merged(finding for each in every for finding in _made(each, allocation))


def _made(each: Callable[..., Any], allocation: Allocation) -> Iterator[Finding]:
    """A check that fails on facts that nobody thought of is a finding as well."""
    try:
        if each in NODE_CHECKS:
            for kind in allocation.kinds:
                yield from (
                    Finding(bad, what, on(kind, places), fix) for bad, what, places, fix in each(allocation, kind)
                )
        else:
            yield from each(allocation)
    except Exception as error:
        what = f"the check `{getattr(each, '__name__', each)}` failed: {type(error).__name__}: {error}"
        yield Finding("note", what, "rank 0", "tell its authors")
