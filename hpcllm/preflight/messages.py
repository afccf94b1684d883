"""Checks of the MPI library and of what it is told by variables. Pure.

Sources: Cray MPICH's man page intro_mpi (MPICH_*); fi_cxi(7) and fi_mr(3) of libfabric (FI_*); the user guides of OLCF
(Frontier) and LUMI for what harms and what helps there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcllm.preflight.facts import Allocation, Kind, RankFacts
from hpcllm.preflight.findings import Finding, everywhere, on
from hpcllm.system.hardware.pci_devices import RDMA

ENOUGH_LOCKED = 64 << 20  # bytes: below that a network card cannot register the buffers of a few messages
FEW_FILES, SOME_FILES = 256, 1024  # that may be open at once: MPI over TCP opens one a peer, a store some, Python some


def threads(allocation: Allocation) -> Iterator[Finding]:
    level = allocation.first.library.threads
    if level != "MULTIPLE":
        yield Finding(
            "note",
            f"MPI gives THREAD_{level}: sums are not hidden behind the computation",
            everywhere(allocation),
            "an MPI library built for THREAD_MULTIPLE; Cray MPICH: do not set MPICH_MAX_THREAD_SAFETY below multiple",
        )


def wheel(allocation: Allocation) -> Iterator[Finding]:
    """A library from PyPI knows shared memory and TCP, and the fast network of such a machine is not used."""
    for kind in allocation.kinds:
        fast = [nic for nic in kind.facts.hardware.nics if nic.kind in RDMA and nic.up]
        bad = _places(kind, lambda facts: facts.library.is_wheel)
        if bad and fast and (fast[0].kind == "slingshot" or allocation.first.variable("CRAYPE_VERSION")):
            yield Finding(
                "slow" if len(allocation.nodes) > 1 else "note",
                f"MPI is a wheel of PyPI's, which does not know {fast[0].kind} ({fast[0].name})",
                on(kind, bad),
                "build mpi4py against the system's MPI: MPICC='cc -shared' pip install --no-binary=mpi4py mpi4py",
            )


def unaware(allocation: Allocation) -> Iterator[Finding]:
    """Cray MPICH reads device memory by a library of its own, which has to be linked and switched on."""
    cray = "CRAY MPICH" in allocation.first.library.version.upper()
    for kind in allocation.kinds:
        enabled = _places(kind, lambda facts: facts.variable("MPICH_GPU_SUPPORT_ENABLED") == "1")
        without = [place for place in enabled if not kind.facts.ranks[place].library.gpu_layer]
        if without and cray:
            yield Finding(
                "breaks",
                "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_* is not loaded: MPI reads device memory and fails",
                on(kind, without),
                "build mpi4py with the modules of the GPU loaded (craype-accel-amd-gfx90a and rocm), or "
                "LD_PRELOAD=${CRAY_MPICH_ROOTDIR}/gtl/lib/libmpi_gtl_hsa.so",
            )
        off = _places(kind, lambda f: cray and bool(f.device) and f.variable("MPICH_GPU_SUPPORT_ENABLED") != "1")
        if off:
            yield Finding(
                "slow" if len(allocation.nodes) > 1 else "note",
                "ranks have devices, and MPI is not told to read their memory: each message is copied to the host",
                on(kind, off),
                "export MPICH_GPU_SUPPORT_ENABLED=1",
            )


def cache_monitor(allocation: Allocation) -> Iterator[Finding]:
    """Settings of the way in which libfabric notices that registered memory was freed."""
    reasons = {
        "memhooks": "can deadlock in the allocator",
        "disabled": "registers memory anew for each message",
    }
    for kind in allocation.kinds:
        by_value: dict[str, list[int]] = {}
        for place, facts in enumerate(kind.facts.ranks):
            by_value.setdefault(facts.variable("FI_MR_CACHE_MONITOR"), []).append(place)
        for value in sorted(by_value.keys() & reasons.keys()):
            what = f"FI_MR_CACHE_MONITOR={value} {reasons[value]}"
            yield Finding("slow", what, on(kind, by_value[value]), "unset it, or kdreg2 (Frontier), userfaultfd (LUMI)")


def rendezvous(allocation: Allocation) -> Iterator[Finding]:
    """Settings for RCCL, which hpcllm does not use, may harm MPI."""
    for kind in allocation.kinds:
        if bad := _places(kind, lambda facts: facts.variable("FI_CXI_RDZV_PROTO") == "alt_read"):
            what = "FI_CXI_RDZV_PROTO=alt_read suits RCCL, and may slow MPI"
            yield Finding(
                "note", what, on(kind, bad), "unset it: hpcllm sends by MPI alone (module unload rccl-net-plugin)"
            )


def huge_pages(allocation: Allocation) -> Iterator[Finding]:
    for kind in allocation.kinds:
        cray = _places(kind, lambda facts: bool(facts.variable("CRAYPE_VERSION")))
        if missing := [p for p in cray if not kind.facts.ranks[p].variable("HUGETLB_DEFAULT_PAGE_SIZE")]:
            what = "no huge pages: the network card looks up 4 KiB pages of large messages one by one"
            yield Finding("note", what, on(kind, missing), "module load craype-hugepages2M, when building and running")


def fork_safe(allocation: Allocation) -> Iterator[Finding]:
    for kind in allocation.kinds:
        if not any(nic.kind == "slingshot" for nic in kind.facts.hardware.nics):
            continue
        if missing := _places(kind, lambda facts: not facts.variable("CXI_FORK_SAFE")):
            what = "CXI_FORK_SAFE is not set: a library that forks (hpcllm does not) would corrupt messages"
            yield Finding("note", what, on(kind, missing), "export CXI_FORK_SAFE=1 CXI_FORK_SAFE_HP=1")


def locked_memory(allocation: Allocation) -> Iterator[Finding]:
    for kind in allocation.kinds:
        if not any(nic.kind in RDMA and nic.up for nic in kind.facts.hardware.nics):
            continue
        low = _places(kind, lambda facts: facts.locked_bytes < ENOUGH_LOCKED)
        if low:
            kib = kind.facts.ranks[low[0]].locked_bytes >> 10
            what = f"only {kib} KiB of memory may be locked (ulimit -l), too little for the network card"
            fix = (
                "ulimit -l unlimited in the job script; if that is refused, the site sets it (PropagateResourceLimits)"
            )
            yield Finding("breaks", what, on(kind, low), fix)


def open_files(allocation: Allocation) -> Iterator[Finding]:
    for kind in allocation.kinds:
        low = _places(kind, lambda facts: facts.open_files < SOME_FILES)
        if low:
            count = min(kind.facts.ranks[place].open_files for place in low)
            what = f"a process may open {count} files (ulimit -n)"
            yield Finding(
                "breaks" if count < FEW_FILES else "note", what, on(kind, low), "ulimit -n 65536 in the job script"
            )


def _places(kind: Kind, bad: Callable[[RankFacts], bool]) -> list[int]:
    return [place for place, facts in enumerate(kind.facts.ranks) if bad(facts)]


CHECKS = (
    threads, wheel, unaware, cache_monitor, rendezvous, huge_pages, fork_safe, locked_memory, open_files,
)  # fmt: skip
