"""What a record says of where it was measured."""

from __future__ import annotations

import os

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm import device
from hpcllm.collectives.group import Group
from hpcllm.errors import ConfigError
from hpcllm.messages.gpu_aware import gpu_aware
from hpcllm.messages.memory import let_mpi_read_devices
from hpcllm.perf.arguments import Options

VALUE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def library_name() -> str:
    """'Open MPI 5.0.8': of the MPI that runs us."""
    text = MPI.Get_library_version().replace("\t", " ").split("\n")[0]
    words = [word.strip("v,:\0") for word in text.split()]
    version = next((word for word in words if word[:1].isdigit()), "")
    name = "Open MPI" if "Open MPI" in text else words[0]
    return f"{name} {version}".strip()


def facts(dtype: str, group: Group) -> str:
    """'float32, 4 ranks on 2 nodes, Open MPI 5.0.8'."""
    ranks, nodes = (
        f"{count} {word}{'s' * (count > 1)}" for count, word in ((group.size, "rank"), (group.nodes, "node"))
    )
    return f"{dtype}, {ranks} on {nodes}, {library_name()}"


def node_of_ranks(group: Group) -> NDArray[np.int32]:
    """(ranks,): the number of each rank's node. Collective over group."""
    numbers = np.empty(group.size, dtype=np.int32)
    group.comm.Allgather(np.array([group.peers.rank], dtype=np.int32), numbers)
    return numbers


def check_memory(need_bytes: int, group: Group) -> None:
    """Raises ConfigError if the arrays of the node's ranks are larger than its memory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = max(group.node_sizes)
    if need_bytes * ranks > memory_bytes:
        raise ConfigError(
            f"--sizes: the largest needs {need_bytes / 1e9:.1f} GB a rank, {need_bytes * ranks / 1e9:.1f} GB for "
            f"{ranks} ranks of a node that has {memory_bytes / 1e9:.1f} GB; ask for less"
        )


def open_device(options: Options, group: Group) -> tuple[torch.device, str]:
    """Where this rank's arrays live, and for people where messages of a device lie, "" for the CPU's.

    Collective over group. Raises ConfigError if PyTorch has no such device.
    """
    found = find_device(options, device.slot(group.node.rank))
    if options.device == "cpu":
        return found, ""
    reach = gpu_aware(group.comm, found, options.gpu_aware)
    let_mpi_read_devices(reach.direct)
    return found, f"messages {'on the device' if reach.direct else 'in pinned host memory'}: {reach.why}"


def find_device(options: Options, node_rank: int) -> torch.device:
    """Where the arrays of that rank of a node live. Raises ConfigError if PyTorch has no such device."""
    if options.device == "cpu":
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        raise ConfigError(f"--device gpu: {device.why_none(os.environ)}; or --device cpu")
    return device.choose("gpu", node_rank)
