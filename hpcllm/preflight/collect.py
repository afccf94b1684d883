"""Facts of this process and this node, and their way to rank 0.

    the kernel -> cores, limits, maps of libraries     MPI -> version, threads, counts     PyTorch -> device, versions

What cannot be found out is a fact, too: it becomes a finding of the rank where it failed. Little travels, for facts
that are equal on many nodes are sent once:

    ranks of a node --> its first rank: NodeFacts, 16 bytes of their hash
    first ranks     --> rank 0: name, ranks, hash, gauges of each node     a row a node
    rank 0          --> "you": the first node with each hash               a bit a node
    those           --> rank 0: NodeFacts in full                          once for all nodes that are alike

Only rank 0 keeps something in proportion to the number of nodes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mpi4py import MPI

import hpcllm
from hpcllm.errors import HpcllmError
from hpcllm.mpi.gpu_aware import mpi_libraries
from hpcllm.mpi.wait import Waits
from hpcllm.preflight.facts import Device, Gauges, Library, Node, NodeFacts, RankFacts
from hpcllm.system import device
from hpcllm.system.device import VISIBILITY
from hpcllm.system.hardware.node import Hardware, allowed_cores
from hpcllm.system.hardware.pci_devices import numa_of_pci

THREADS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}
# those that checks read
VARIABLES = (
    "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_NUM_NODES", "CRAYPE_VERSION",
    "MPICH_GPU_SUPPORT_ENABLED", "MPICH_OFI_NIC_POLICY", "FI_MR_CACHE_MONITOR", "FI_CXI_RDZV_PROTO", "NCCL_NET_PLUGIN",
    "HUGETLB_DEFAULT_PAGE_SIZE", "CXI_FORK_SAFE", *device.VISIBILITY,
)  # fmt: skip
PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "numba")


def rank_facts(wanted: str, node_rank: int) -> RankFacts:
    """Collect the facts of this process. Raises ConfigError if it cannot have the device that it is to have.

    wanted: run.device. node_rank: number of this rank among those of its node.
    """
    faults: list[str] = []
    chosen, why_none = _device(wanted, node_rank, faults)
    return RankFacts(
        cores=allowed_cores(),
        library=library(faults),
        device=chosen,
        no_device=why_none,
        environment=tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
        software=(("python", platform.python_version()), ("hpcllm", hpcllm.__version__), *_versions()),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        fault="; ".join(faults),
    )


def library(faults: list[str]) -> Library:
    """The MPI that runs us."""
    files = mpi_libraries()
    own = next((path for path in files if Path(path).name.startswith(("libmpi.", "libmpi_cray", "libmpich"))), "")
    try:
        large = _takes_large_counts()
    except Exception as error:
        large = False
        faults.append(f"whether MPI takes large counts: {error}")
    return Library(
        version=" ".join(MPI.Get_library_version().split("\n")[0].split()).strip("\0"),
        file=own,
        is_wheel=own.startswith(sys.prefix) or "site-packages" in own,
        threads=THREADS.get(MPI.Query_thread(), "?"),
        large_counts=large,
        gpu_layer=any("libmpi_gtl_" in path for path in files),
    )


def source_hash() -> str:
    """Hash of this package's own text: two ranks that differ do not run the same program. Reads all of it."""
    import xxhash

    total = xxhash.xxh3_64()
    folder = Path(hpcllm.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _takes_large_counts() -> bool:
    """A broadcast of one rank to itself: the library looks at the count, nobody at the memory, so that stays empty."""
    count = (1 << 31) + 1
    with mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            MPI.COMM_SELF.Bcast([memory, count, MPI.BYTE])
        except (MPI.Exception, OverflowError):
            return False
    return True


def _device(wanted: str, node_rank: int, faults: list[str]) -> tuple[Device | None, str]:
    """Device of the rank, or None and the reason why it computes on the CPU. Raises ConfigError."""
    try:
        chosen = device.choose_device(wanted, node_rank)
        if chosen.type == "cpu":
            why = device.no_device_reason(os.environ).replace(
                f" on {platform.node()}", ""
            )  # equal on nodes that are alike
            return None, "run.device = 'cpu'" if wanted == "cpu" else why
        return _facts(chosen, os.environ), ""
    except HpcllmError:
        raise
    except Exception as error:  # a driver that fails in any way
        faults.append(f"the device: {type(error).__name__}: {error}")
        return None, str(error)


def _facts(chosen: torch.device, environment: Mapping[str, str]) -> Device:
    found = device.device_facts(chosen)
    return Device(
        kind=found.kind,
        name=found.name,
        index=found.index,
        visible=torch.accelerator.device_count(),
        identity=device.device_identity(found, environment),
        address=found.address,
        numa=numa_of_pci(found.address),
        memory_bytes=found.memory_bytes,
        unfit=_unfit(chosen),
    )


def _unfit(chosen: torch.device) -> str:
    """Why this PyTorch has no kernels for the device, found out by running one."""
    try:
        total = torch.ones(2, device=chosen).sum().item()
    except RuntimeError as error:  # "no kernel image is available", "invalid device function"
        return str(error).partition("\n")[0]
    return "" if total == 2 else f"1 + 1 is {total:g} there"


def _versions() -> list[tuple[str, str]]:
    """Versions of packages that are loaded anyway."""
    modules = ((name, sys.modules.get(name)) for name in PACKAGES)
    return [(name, str(getattr(module, "__version__", "?"))) for name, module in modules if module]


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


TAG = 32701
PCI = re.compile(r"|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")  # an address, or none
VISIBLE = re.compile(r"[0-9.,:* -]*")  # places in a node's list of devices


@dataclass(frozen=True)
class Communicators:
    """Communicators of the preflight, this rank's place in them, and its patience. See `open_communicators`."""

    world: MPI.Intracomm
    node: MPI.Intracomm  # ranks that share memory
    leaders: MPI.Intracomm  # first ranks of the nodes; COMM_NULL on the others
    waits: Waits

    @property
    def leads(self) -> bool:
        return bool(self.node.rank == 0)

    def arrive(self, what: str) -> None:
        """Return when all ranks are here. Collective over world. Raises StallError."""
        self.waits.all([self.world.Ibarrier()], lambda: f"all {self.world.size} ranks {what}")

    def free(self) -> None:
        """Collective over world."""
        if self.leaders != MPI.COMM_NULL:
            self.leaders.Free()
        self.node.Free()


def open_communicators(world: MPI.Intracomm, waits: Waits) -> Communicators:
    """Collective over world."""
    node = MPI.Intracomm(world.Split_type(MPI.COMM_TYPE_SHARED, world.rank))
    leaders = MPI.Intracomm(world.Split(0 if node.rank == 0 else MPI.UNDEFINED, world.rank))
    return Communicators(world, node, leaders, waits)


@dataclass(frozen=True)
class NodeReport:
    """Facts of a node, as its first rank reports them."""

    name: str
    hardware: Hardware
    gauges: Gauges
    source: str = ""  # see NodeFacts


def gather(comms: Communicators, mine: RankFacts, own: NodeReport | None) -> list[Node]:
    """All nodes in the order of their lowest ranks, on rank 0; nothing elsewhere. Collective over comms.world.

    own: on the first rank of a node. Raises StallError.
    """
    comms.arrive("to say what they found")
    rows = comms.node.gather((comms.world.rank, mine))
    if rows is None or own is None:
        return []
    ranks = tuple(rank for rank, _ in rows)
    facts = NodeFacts(own.hardware, _numbered([found for _, found in rows]), own.source)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    table = comms.leaders.gather((own.name, ranks, digest, own.gauges))
    wanted = None
    if table is not None:
        digests = [digest for _, _, digest, _ in table]
        wanted = [digests.index(digest) == place for place, digest in enumerate(digests)]
    is_wanted = comms.leaders.scatter(wanted)
    if table is None or wanted is None:
        if is_wanted:
            comms.leaders.send(facts, 0, TAG)
        return []
    kinds = {digest: facts}
    for place, digest in enumerate(digests):
        if wanted[place] and place:
            kinds[digest] = comms.leaders.recv(source=place, tag=TAG)
    return [Node(name, ranks, kinds[digest], gauges) for name, ranks, digest, gauges in table]


def _numbered(ranks: list[RankFacts]) -> tuple[RankFacts, ...]:
    """Devices that are told apart by numbers of their own get small ones, so that nodes that are alike are equal."""
    addresses = (rank.device.address for rank in ranks if rank.device)
    own = list(dict.fromkeys(address for address in addresses if not PCI.fullmatch(address)))
    found = []
    for rank in ranks:
        if rank.device and rank.device.address in own:
            name = f"number {own.index(rank.device.address)} of the node"
            rank = replace(rank, device=replace(rank.device, identity=name, address=""))
        rest = (name for name, value in rank.environment if name in VISIBILITY and not VISIBLE.fullmatch(value))
        hidden = dict.fromkeys(rest, "(by their own numbers)")
        found.append(replace(rank, environment=tuple((k, hidden.get(k, v)) for k, v in rank.environment)))
    return tuple(found)
