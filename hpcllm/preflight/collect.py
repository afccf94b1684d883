"""What this process and this node are found to be.

    the kernel -> cores, limits, maps of libraries     MPI -> version, threads, counts     PyTorch -> device, versions

Nothing here is collective, and what fails is a fact, too: it is told as a finding of the rank where it failed.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from mpi4py import MPI

import hpcllm
from hpcllm import device
from hpcllm.errors import HpcllmError
from hpcllm.hardware.devices import numa_of_pci
from hpcllm.hardware.libraries import mpi_libraries
from hpcllm.hardware.node import allowed_cores
from hpcllm.preflight.facts import Device, Library, RankFacts

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


def rank_facts(wish: str, node_rank: int) -> RankFacts:
    """Of this process. wish: run.device. node_rank: among the ranks of its node. Raises ConfigError if the wish cannot
    be met."""
    faults: list[str] = []
    chosen, why_none = _device(wish, node_rank, faults)
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
    """Of this package's own text: two ranks that differ do not run the same program. Reads all of it."""
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


def _device(wish: str, node_rank: int, faults: list[str]) -> tuple[Device | None, str]:
    """What the rank computes on, and why it is no device where it is the CPU. Raises ConfigError."""
    try:
        chosen = device.choose(wish, node_rank)
        if chosen.type == "cpu":
            why = device.why_none(os.environ).replace(f" on {platform.node()}", "")  # equal on nodes that are alike
            return None, "run.device = 'cpu'" if wish == "cpu" else why
        return _facts(chosen, os.environ), ""
    except HpcllmError:
        raise
    except Exception as error:  # a driver that fails in any way
        faults.append(f"the device: {type(error).__name__}: {error}")
        return None, str(error)


def _facts(chosen: torch.device, environment: Mapping[str, str]) -> Device:
    found = device.facts(chosen)
    return Device(
        kind=found.kind,
        name=found.name,
        index=found.index,
        visible=torch.accelerator.device_count(),
        identity=device.same_device(found, environment),
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
    """Of packages that are loaded anyway."""
    modules = ((name, sys.modules.get(name)) for name in PACKAGES)
    return [(name, str(getattr(module, "__version__", "?"))) for name, module in modules if module]


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft
