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

import dataclasses
import hashlib
import mmap
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import xxhash
from mpi4py import MPI

import hpcllm
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_all
from hpcllm.mpi.gpu_aware import mpi_libraries
from hpcllm.mpi.wait import Waits, name_members
from hpcllm.preflight.facts import Allocation, Device, Gauges, Library, Node, NodeFacts, RankFacts
from hpcllm.system import device
from hpcllm.system.device import ALLOCATOR, VISIBILITY
from hpcllm.system.hardware.node import allowed_cores, find_free_memory, find_hardware, node_name
from hpcllm.system.hardware.pci_devices import numa_of_pci
from hpcllm.system.job import keep_freed_memory, launched_ranks, launcher
from hpcllm.system.nvml import takes_one_process

THREADS = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
# those that checks read
VARIABLES = (
    "OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_NUM_NODES", "CRAYPE_VERSION",
    "MPICH_GPU_SUPPORT_ENABLED", "MPICH_OFI_NIC_POLICY", "FI_MR_CACHE_MONITOR", "FI_CXI_RDZV_PROTO", "NCCL_NET_PLUGIN",
    "HUGETLB_DEFAULT_PAGE_SIZE", "CXI_FORK_SAFE", *VISIBILITY, *ALLOCATOR,
)  # fmt: skip
PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "numba")
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
        self.waits.all([self.world.Ibarrier()], lambda: f"{name_members(self.world)} {what}")

    def free(self) -> None:
        """Collective over world."""
        if self.leaders != MPI.COMM_NULL:
            self.leaders.Free()
        self.node.Free()


def open_communicators(world: MPI.Intracomm, waits: Waits) -> Communicators:
    """Collective over world."""
    waits.all([world.Ibarrier()], lambda: f"{name_members(world)} to begin")
    node = cast(MPI.Intracomm, world.Split_type(MPI.COMM_TYPE_SHARED, world.rank))
    leaders = cast(MPI.Intracomm, world.Split(0 if node.rank == 0 else MPI.UNDEFINED, world.rank))
    return Communicators(world, node, leaders, waits)


def facts_of_all(comms: Communicators, wanted: str) -> RankFacts:
    """Facts of this rank. Collective over comms.world. wanted: run.device.

    Raises ConfigError on all ranks if one of them cannot have the device that it is to have.
    """
    return on_all(comms.world, lambda: _rank_facts(wanted, device.local_rank(comms.node.rank)))


def _rank_facts(wanted: str, node_rank: int) -> RankFacts:
    """Collect the facts of this process, the node_rank-th of its node. Raises ConfigError."""
    faults: list[str] = []
    chosen, why_none = _device(wanted, node_rank, faults)
    loaded = ((name, sys.modules.get(name)) for name in PACKAGES)  # those that are loaded anyway
    versions = [(name, str(getattr(module, "__version__", "?"))) for name, module in loaded if module]
    return RankFacts(
        cores=allowed_cores(),
        library=_library(faults),
        device=chosen,
        no_device=why_none,
        environment=tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
        software=(("python", platform.python_version()), ("hpcllm", hpcllm.__version__), *versions),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        freed_memory=keep_freed_memory(),  # as the start of a job does; once more changes nothing
        fault="; ".join(faults),
    )


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft


def _library(faults: list[str]) -> Library:
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
        if chosen.type != "cpu":
            return _device_facts(chosen), ""
        if wanted == "cpu":
            return None, "run.device = 'cpu'"
        return None, device.no_device_reason(os.environ).replace(
            f" on {platform.node()}", ""
        )  # so that nodes are alike
    except HpcllmError:
        raise
    except Exception as error:  # a driver that fails in any way
        faults.append(f"the device: {type(error).__name__}: {error}")
        return None, str(error)


def _device_facts(chosen: torch.device) -> Device:
    found = device.device_facts(chosen)
    return Device(
        **dataclasses.asdict(found),
        visible=torch.accelerator.device_count(),
        identity=device.device_identity(found, os.environ),
        numa=numa_of_pci(found.address),
        unfit=_unfit(chosen),
        one_process=bool(found.address) and takes_one_process(found.address),
    )


def _unfit(chosen: torch.device) -> str:
    """Why this PyTorch has no kernels for the device, found out by running one."""
    try:
        total = torch.ones(2, device=chosen).sum().item()
    except RuntimeError as error:  # "no kernel image is available", "invalid device function"
        return str(error).partition("\n")[0]
    return "" if total == 2 else f"1 + 1 is {total:g} there"


def source_hash() -> str:
    """Hash of this package's own text: two ranks that differ do not run the same program. Reads all of it."""
    total = xxhash.xxh3_64()
    folder = Path(hpcllm.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def find_allocation(
    comms: Communicators, mine: RankFacts, source: str = "", others_cores: float = 0.0
) -> Allocation | None:
    """Facts of the whole allocation, on rank 0; None elsewhere. Collective over comms.world. Raises StallError.

    source: of the text of this package. others_cores: see Gauges; both from first ranks of nodes.
    """
    comms.arrive("to start")  # so that clocks are read at about one time
    gauges = hardware = None
    if comms.leads:
        free = find_free_memory()
        gauges = Gauges(free.available_bytes, free.shared_bytes, time.time(), others_cores)
        hardware = find_hardware()
        hardware = dataclasses.replace(hardware, memory=hardware.memory.rounded())
    comms.arrive("to say what they found")
    rows = comms.node.gather((comms.world.rank, mine))
    if rows is None or hardware is None or gauges is None:
        return None
    facts = NodeFacts(hardware, _numbered([found for _, found in rows]), source)
    nodes = _gather(comms.leaders, Node(node_name(), tuple(rank for rank, _ in rows), facts, gauges))
    return Allocation(tuple(nodes), launcher(), launched_ranks()) if nodes else None


def _gather(leaders: MPI.Intracomm, own: Node) -> list[Node]:
    """All nodes in the order of their lowest ranks, on rank 0; nothing elsewhere. Collective over leaders."""
    digest = hashlib.blake2b(repr(own.facts).encode(), digest_size=16).digest()
    table = leaders.gather((own.name, own.ranks, digest, own.gauges)) or []
    digests = [digest for _, _, digest, _ in table]
    first = [digests.index(digest) == place for place, digest in enumerate(digests)]
    is_first = leaders.scatter(first or None)
    if not table:
        if is_first:
            leaders.send(own.facts, 0, TAG)
        return []
    others = [place for place, wanted in enumerate(first) if wanted and place]
    kinds = {digest: own.facts} | {digests[place]: leaders.recv(source=place, tag=TAG) for place in others}
    return [Node(name, ranks, kinds[digest], gauges) for name, ranks, digest, gauges in table]


def _numbered(ranks: Sequence[RankFacts]) -> tuple[RankFacts, ...]:
    """Devices that are told apart by numbers of their own get small ones, so that nodes that are alike are equal."""
    addresses = (rank.device.address for rank in ranks if rank.device)
    own = list(dict.fromkeys(address for address in addresses if not PCI.fullmatch(address)))
    found = []
    for rank in ranks:
        if rank.device and rank.device.address in own:
            name = f"number {own.index(rank.device.address)} of the node"
            rank = dataclasses.replace(rank, device=dataclasses.replace(rank.device, identity=name, address=""))
        rest = (name for name, value in rank.environment if name in VISIBILITY and not VISIBLE.fullmatch(value))
        hidden = dict.fromkeys(rest, "(by their own numbers)")
        found.append(dataclasses.replace(rank, environment=tuple((k, hidden.get(k, v)) for k, v in rank.environment)))
    return tuple(found)
