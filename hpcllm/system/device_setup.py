"""Set-up of a rank's device: which it takes, whether MPI reads its memory, its peak performance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hpcllm.codecs import find_codec
from hpcllm.config.policies import FEEDBACK
from hpcllm.config.schema import Config, traffic_codecs
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.gpu_aware import DeviceAccess, gpu_aware
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.message_memory import let_mpi_read_devices
from hpcllm.system.device import DeviceFacts, peak_tflops_of_rank, take_device, torch_dtype


@dataclass(frozen=True)
class DeviceSetup:
    """Device of this rank, and how it is used."""

    device: torch.device
    facts: DeviceFacts
    ranks: int  # largest number of ranks that share a device; 1 on CPUs
    mpi_access: DeviceAccess | None  # of MPI to the device's memory; None: there is no device, or one rank alone
    peak_tflops: float | None  # of one rank; None: not known

    @property
    def text(self) -> str:
        """Text for people: 'AMD Instinct MI250X (64 GB) a rank, 7 thread(s) a rank'."""
        threads = f"{torch.get_num_threads()} thread(s) a rank"
        if self.device.type == "cpu":
            return threads
        shared = f", up to {self.ranks} ranks on one device" if self.ranks > 1 else ""
        return f"{self.facts.text} a rank{shared}, {threads}"


def set_up_device(config: Config, mesh: Mesh) -> DeviceSetup:
    """Take a device and place messages where MPI reads them. Collective over the mesh. Raises ConfigError."""
    taken = take_device(config.run.device, mesh.world, mesh.node, config.run.deterministic)
    check_codecs(config, mesh, taken.device)
    check_offload(config, taken.device)
    threads = torch.get_num_threads()
    peak_tflops = on_root(mesh.world, lambda: peak_tflops_of_rank(config, taken.facts, threads))
    access = None
    if taken.device.type != "cpu" and mesh.world.size > 1:
        folder = Path(config.run.folder) / config.run.name
        access = gpu_aware(mesh.world, taken.device, config.communication.gpu_aware, folder)
        let_mpi_read_devices(access.direct)
    return DeviceSetup(taken.device, taken.facts, taken.ranks, access, peak_tflops)


def check_offload(config: Config, device: torch.device) -> None:
    """Raise ConfigError where memory of the host is asked for beside that of a device, and there is no device."""
    for table, what in (("optimizer", "states"), ("pipeline", "activations")):
        if device.type == "cpu" and getattr(config, table).offload:
            raise ConfigError(
                f"{table}.offload = true, but this run computes on the CPU, where {what} are in the host's memory "
                "anyway; valid: false, or a device (run.device, --device)"
            )


def check_codecs(config: Config, mesh: Mesh, device: torch.device) -> None:
    """Raise ConfigError for traffic of this mesh whose codec cannot run on the device."""
    travels = {
        "gradients": mesh.dp.size > 1,
        "parameters": mesh.dp.size > 1 and config.optimizer.shard != "none",
        "forward": mesh.pp.size > 1,
        "backward": mesh.pp.size > 1,
        "tensor": mesh.tp.size > 1,
    }
    for kind, name in traffic_codecs(config.communication).items() if device.type != "cpu" else ():
        if not travels[kind]:
            continue
        dtype = torch.float32 if kind == "gradients" else torch_dtype(config.precision.compute)
        try:
            find_codec(name.removesuffix(FEEDBACK), dtype, device.type)
        except ValueError as error:
            raise ConfigError(f"communication.{kind} = {name!r} (or communication.policy): {error}") from error
