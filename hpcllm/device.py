"""Which device a rank computes on: one of those that the batch system has left visible, or the CPU.

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

from hpcllm.config import Config
from hpcllm.errors import ConfigError
from hpcllm.launched import launcher
from hpcllm.machines import peak_of_device, peak_tflops
from hpcllm.together import raise_together

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

# what leaves a process some of a node's devices: CUDA, ROCm (the runtime, then HIP), Intel's Level Zero
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# where launchers say a rank's place on its node; mpich: those of HPE's PALS
SLOTS = {"slurm": "SLURM_LOCALID", "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK", "mpich": "PALS_LOCAL_RANKID"}


@dataclass(frozen=True)
class DeviceFacts:
    """What PyTorch says of a device."""

    kind: str  # PyTorch's word: "cuda", for ROCm too, "xpu", "cpu"
    index: int  # among those that this process sees
    name: str  # "AMD Instinct MI250X"; of the CPU ""
    memory_bytes: int  # 0: not known
    address: str  # on the PCI bus, "0000:c1:00.0", or what else tells devices of a node apart; "": not known

    @property
    def text(self) -> str:
        """'AMD Instinct MI250X (64 GB)'."""
        return f"{self.name} ({self.memory_bytes / 1e9:.0f} GB)" if self.memory_bytes else self.name


@dataclass(frozen=True)
class Taken:
    """The device of this rank in a job."""

    device: torch.device
    facts: DeviceFacts
    ranks: int  # that compute on one device, the most of all devices; 1 on CPUs


def take(wish: str, world: MPI.Intracomm, node: MPI.Intracomm) -> Taken:
    """`choose`, for all ranks of a job. Collective over world; node: the ranks of it that share memory.

    Raises ConfigError on all ranks, naming some for whom there is no device.
    """
    import torch
    from mpi4py import MPI

    device, error = torch.device("cpu"), None
    try:
        device = choose(wish, slot(node.rank))
    except ConfigError as refusal:
        error = refusal
    raise_together(world, error)
    found = facts(device)
    words = node.allgather(same_device(found, os.environ) if found.kind != "cpu" else "")
    most = np.array([found.kind != "cpu", max(map(words.count, words))])
    world.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if most[0] and found.kind == "cpu":
        seen = why_none(os.environ)
        error = ConfigError(f"{seen}; other ranks see devices: leave this node out, or run.device = 'cpu'")
    raise_together(world, error)
    return Taken(device, found, int(most[1]) if most[0] else 1)


def peak_of(config: Config, found: DeviceFacts, threads: int) -> float | None:
    """TFLOP/s that a rank could do at best; None: not known, as for fp32 on a device. Raises ConfigError."""
    if found.kind == "cpu":
        return peak_tflops(config.run.machine, threads)
    known = peak_tflops(config.run.machine, threads, on_device=True) or peak_of_device(found.name)
    return None if config.precision.compute == "fp32" else known


def place(wish: str, visible: int, node_rank: int, why_none: str) -> int | None:
    """Index of the device that a rank takes, None for the CPU. Pure.

    wish: run.device. visible: devices that this process sees. why_none: said if it sees none. Raises ConfigError.
    """
    if wish == "cpu" or (wish == "auto" and not visible):
        return None
    if not visible:
        raise ConfigError(f"run.device (--device) is 'gpu', but {why_none}; or 'cpu', or 'auto' to take what is there")
    return node_rank % visible


def choose(wish: str, node_rank: int = 0) -> torch.device:
    """The device of this rank, made the current one of this thread; arithmetic is set up on it, see `settle`.

    wish: run.device. node_rank: among the ranks of its node. Not collective. Raises ConfigError.
    """
    import torch

    visible = torch.accelerator.device_count() if wish != "cpu" and torch.accelerator.is_available() else 0
    index = place(wish, visible, node_rank, "" if visible else why_none(os.environ))
    if index is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    settle(kind.type, quiet=node_rank > 0)
    return torch.device(kind.type, index)


def slot(node_rank: int) -> int:
    """The place of this rank on its node as the launcher counts, by which cores are given out; else node_rank.

    Both are the same unless a file has reordered the ranks (MPICH_RANK_REORDER_METHOD).
    """
    told = os.environ.get(SLOTS.get(launcher(), ""), "")
    return int(told) if told.isdigit() else node_rank


def why_none(environment: Mapping[str, str]) -> str:
    """Why PyTorch sees no device here, and what would mend it, for people."""
    import torch

    seen = f"PyTorch {torch.__version__} on {platform.node()} sees none"
    version: Any = torch.version
    if not any(getattr(version, kind, None) for kind in ("cuda", "hip", "xpu")):
        return f"{seen}: it was built for CPUs alone; valid: a PyTorch for CUDA, ROCm or XPU"
    hidden = ", ".join(f"{name}={environment[name]!r}" for name in VISIBILITY if name in environment)
    asked = "devices asked of the batch system (such as --gpus-per-node), and a driver that its PyTorch was built for"
    return f"{seen}{f', with {hidden}' if hidden else ''}; valid: {asked}"


def settle(kind: str, quiet: bool) -> None:
    """Arithmetic on devices: fp32 is fp32, 16-bit sums are fp32, and the same layout gives the same bits.

    The last asks PyTorch for kernels whose sums have one order, of attention's backward pass above all, which adds up
    with atomics otherwise, also where PyTorch is only asked to warn. Embeddings, and scatters into rows of their own,
    have one order anyway. Of other kinds than CUDA and ROCm nobody knows yet what lacks such a kernel: there PyTorch
    says so, once; quiet: not here. The process is set, not the device.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is made
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True, warn_only=kind != "cuda")
    # else every torch.empty would be filled, the largest buffers among them
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if quiet:
        warnings.filterwarnings("ignore", message=".*deterministic.*")


def facts(device: torch.device) -> DeviceFacts:
    """What is known of a device."""
    if device.type == "cpu":
        return DeviceFacts("cpu", 0, "", 0, "")
    properties = _properties(device)
    name = getattr(properties, "name", device.type)
    memory_bytes = int(getattr(properties, "total_memory", 0))
    return DeviceFacts(device.type, device.index or 0, name, memory_bytes, _address(properties))


def same_device(found: DeviceFacts, environment: Mapping[str, str]) -> str:
    """A word that two ranks of a node have in common only if they compute on the same device."""
    left = " ".join(f"{name}={environment[name]}" for name in VISIBILITY if name in environment)
    return found.address or f"{left} {found.kind}:{found.index}"


def synchronize(device: torch.device) -> None:
    """Return when everything that was started on the device is done."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


def memory_module(device: torch.device) -> Any:
    """What counts a device's memory: memory_allocated, max_memory_allocated, reset_peak_memory_stats; None: nothing."""
    if device.type == "cpu":
        return None
    import torch

    module: Any = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def _properties(device: torch.device) -> Any:
    import torch

    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return ask(device.index or 0) if ask else None


def _address(properties: Any) -> str:
    """Domain, bus and device; else the device's own number, which some drivers and older PyTorch leave out."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(isinstance(number, int) for number in numbers[1:]):
        domain, bus, slot = (number or 0 for number in numbers)
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return str(getattr(properties, "uuid", ""))
