"""Choice of the device that a rank computes on: one that the batch system has left visible, or the CPU.

    node with 4 devices, 4 ranks     every rank sees all four          rank r of the node takes device r
                                     each rank sees one, its own       it is number 0 there, for all of them
    4 devices, 6 ranks               ranks 4 and 5 share with 0 and 1  slower; said at the start

PyTorch's one name for CUDA, ROCm and Intel's XPU is the accelerator, so nothing here, or above, knows a vendor. On
MI250X a device is a GCD, half of what is sold as one GPU; on Aurora it is a tile.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcllm.config.machines import peak_of_device, peak_tflops
from hpcllm.config.schema import DTYPES, Config
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import raise_if_any_failed
from hpcllm.system.job import launcher

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

# what leaves a process some of a node's devices: CUDA, ROCm (the runtime, then HIP), Intel's Level Zero
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# settings of PyTorch's allocator on devices: its new name, and those of CUDA and ROCm
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# where launchers say a rank's number on its node; mpich: those of HPE's PALS
LOCAL_RANK_VARIABLES = {
    "slurm": "SLURM_LOCALID",
    "flux": "FLUX_TASK_LOCAL_ID",
    "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK",
    "mpich": "PALS_LOCAL_RANKID",
}

_streams: dict[torch.device, torch.Stream] = {}  # of computation


def torch_dtype(precision: str) -> torch.dtype:
    """PyTorch's dtype for a value of precision.compute: "fp32", "bf16" or "fp16"."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[precision])
    return dtype


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device that PyTorch tells."""

    kind: str  # PyTorch's word: "cuda", for ROCm too, "xpu", "cpu"
    index: int  # among those that this process sees
    name: str  # "AMD Instinct MI250X"; of the CPU ""
    memory_bytes: int  # 0: not known
    address: str  # on the PCI bus, "0000:c1:00.0", or what else tells devices of a node apart; "": not known

    @property
    def text(self) -> str:
        """Text for people: 'AMD Instinct MI250X (64 GB)'."""
        return f"{self.name} ({self.memory_bytes / 1e9:.0f} GB)" if self.memory_bytes else self.name


@dataclass(frozen=True)
class TakenDevice:
    """Device of this rank in a job."""

    device: torch.device
    facts: DeviceFacts
    ranks: int  # largest number of ranks that share a device; 1 on CPUs


def take_device(requested: str, world: MPI.Intracomm, node: MPI.Intracomm, deterministic: bool = True) -> TakenDevice:
    """Choose the device of each rank of a job. Collective over world; node: the ranks that share memory.

    deterministic: run.deterministic, the same on all ranks. Raises ConfigError on all ranks, naming some for whom there
    is no device.
    """
    import torch
    from mpi4py import MPI

    device, error = torch.device("cpu"), None
    try:
        device = choose_device(requested, local_rank(node.rank), deterministic)
    except ConfigError as failure:
        error = failure
    raise_if_any_failed(world, error)
    found = device_facts(device)
    identities = node.allgather(device_identity(found, os.environ) if found.kind != "cpu" else "")
    most = np.array([found.kind != "cpu", max(map(identities.count, identities))])
    world.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if most[0] and found.kind == "cpu":
        seen = no_device_reason(os.environ)
        error = ConfigError(f"{seen}; other ranks see devices: leave this node out, or run.device = 'cpu'")
    raise_if_any_failed(world, error)
    return TakenDevice(device, found, int(most[1]) if most[0] else 1)


def peak_tflops_of_rank(config: Config, found: DeviceFacts, threads: int) -> float | None:
    """Return the peak TFLOP/s of a rank; None: not known, as for fp32 on a device. Raises ConfigError."""
    if found.kind == "cpu":
        return peak_tflops(config.run.machine, threads)
    known = peak_tflops(config.run.machine, threads, on_device=True) or peak_of_device(found.name)
    return None if config.precision.compute == "fp32" else known


def device_index(requested: str, visible: int, node_rank: int, reason: str) -> int | None:
    """Return the index of the device that a rank takes, None for the CPU. Pure.

    requested: run.device. visible: number of visible devices. reason: why there is none. Raises ConfigError.
    """
    if requested == "cpu" or (requested == "auto" and not visible):
        return None
    if not visible:
        raise ConfigError(f"run.device (--device) is 'gpu', but {reason}; or 'cpu', or 'auto' to take what is there")
    return node_rank % visible


def choose_device(requested: str, node_rank: int = 0, deterministic: bool = True) -> torch.device:
    """Return the device of this rank, made the current one of this thread, on a stream of its own; sets arithmetic.

    requested, deterministic: keys of [run]. node_rank: among the ranks of its node. Not collective. Raises ConfigError.
    """
    import torch

    visible = torch.accelerator.device_count() if requested != "cpu" and torch.accelerator.is_available() else 0
    index = device_index(requested, visible, node_rank, "" if visible else no_device_reason(os.environ))
    if index is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    set_arithmetic(kind.type, deterministic, quiet=node_rank > 0)
    chosen = torch.device(kind.type, index)
    compute_on_own_stream(chosen)
    return chosen


def compute_on_own_stream(device: torch.device) -> None:
    """Let this thread's work for a device go to a stream of its own from now on, one a process.

    What a library copies without naming a stream, as an MPI may do with device memory, goes to the default stream, and
    would wait there behind all kernels of a step.
    """
    import torch

    stream = _streams.get(device) or _streams.setdefault(device, torch.Stream(device))
    stream.wait_stream(torch.accelerator.current_stream(device))
    torch.accelerator.set_stream(stream)


def local_rank(node_rank: int) -> int:
    """Return this rank's number on its node as the launcher counts, by which cores are given out; else node_rank.

    Both are the same unless a file has reordered the ranks (MPICH_RANK_REORDER_METHOD).
    """
    number = os.environ.get(LOCAL_RANK_VARIABLES.get(launcher(), ""), "")
    return int(number) if number.isdigit() else node_rank


def no_device_reason(environment: Mapping[str, str]) -> str:
    """Return why PyTorch sees no device here and how to fix it, for people."""
    import torch

    seen = f"PyTorch {torch.__version__} on {platform.node()} sees none"
    version: Any = torch.version
    if not any(getattr(version, kind, None) for kind in ("cuda", "hip", "xpu")):
        return f"{seen}: it was built for CPUs alone; valid: a PyTorch for CUDA, ROCm or XPU"
    hidden = ", ".join(f"{name}={environment[name]!r}" for name in VISIBILITY if name in environment)
    fix = "devices requested from the batch system (such as --gpus-per-node), a driver that its PyTorch was built for"
    return f"{seen}{f', with {hidden}' if hidden else ''}; valid: {fix}"


def set_arithmetic(kind: str, deterministic: bool, quiet: bool) -> None:
    """Set up arithmetic on devices: fp32 is fp32, 16-bit sums are fp32; deterministic: one layout, the same bits.

    The last requests from PyTorch kernels whose sums have one order, of attention's backward pass above all, which adds
    up with atomics otherwise, also where PyTorch is only asked to warn. Without it PyTorch may take cuDNN's attention,
    too. Embeddings, and scatters into rows of their own, have one order anyway. Of other kinds than CUDA and ROCm
    nobody knows yet what lacks such a kernel: there PyTorch says so, once; quiet: not here. The process is set, not the
    device.
    """
    import torch

    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is made
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(deterministic, warn_only=kind != "cuda")
    # else every torch.empty would be filled, the largest buffers among them
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if quiet:
        warnings.filterwarnings("ignore", message=".*deterministic.*")


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of a device."""
    if device.type == "cpu":
        return DeviceFacts("cpu", 0, "", 0, "")
    properties = _properties(device)
    name = getattr(properties, "name", device.type)
    memory_bytes = int(getattr(properties, "total_memory", 0))
    return DeviceFacts(device.type, device.index or 0, name, memory_bytes, _address(properties))


def device_identity(found: DeviceFacts, environment: Mapping[str, str]) -> str:
    """Return a text that is equal on two ranks of a node only if they compute on the same device."""
    left = " ".join(f"{name}={environment[name]}" for name in VISIBILITY if name in environment)
    return found.address or f"{left} {found.kind}:{found.index}"


def synchronize(device: torch.device) -> None:
    """Return when everything that was started on the device is done."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


def recorded(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event at the end of what a stream has been told so far. stream: None for this thread's current one."""
    import torch

    event = torch.Event(device, enable_timing=False)
    event.record(stream or torch.accelerator.current_stream(device))
    return event


def memory_module(device: torch.device) -> Any:
    """Return PyTorch's module with a device's memory_allocated, max_memory_allocated, ...; None if there is none."""
    if device.type == "cpu":
        return None
    import torch

    module: Any = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def _properties(device: torch.device) -> Any:
    import torch

    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    return read(device.index or 0) if read else None


def _address(properties: Any) -> str:
    """Return domain, bus and device; else the device's own number, which some drivers and older PyTorch leave out."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(isinstance(number, int) for number in numbers[1:]):
        domain, bus, unit = (number or 0 for number in numbers)
        return f"{domain:04x}:{bus:02x}:{unit:02x}.0"
    return str(getattr(properties, "uuid", ""))
