"""Where a rank computes, and where its messages lie: its device, MPI's reach to that, and what it could do at best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcllm.codecs import find_codec
from hpcllm.config import Config, traffic_codecs
from hpcllm.device import DeviceFacts, peak_of, take
from hpcllm.errors import ConfigError
from hpcllm.mesh import Mesh
from hpcllm.messages.gpu_aware import Reach, gpu_aware
from hpcllm.messages.memory import let_mpi_read_devices
from hpcllm.policy import FEEDBACK
from hpcllm.precision import compute_dtype
from hpcllm.together import on_root


@dataclass(frozen=True)
class Placed:
    device: torch.device
    facts: DeviceFacts
    ranks: int  # on one device, the most of all devices; 1 on CPUs
    reach: Reach | None  # of MPI, to memory of the device; None: there is no device, or nobody to send to
    peak_tflops: float | None  # of one rank; None: not known

    @property
    def text(self) -> str:
        """'AMD Instinct MI250X (64 GB) a rank, 7 thread(s) a rank'."""
        threads = f"{torch.get_num_threads()} thread(s) a rank"
        if self.device.type == "cpu":
            return threads
        shared = f", up to {self.ranks} ranks on one device" if self.ranks > 1 else ""
        return f"{self.facts.text} a rank{shared}, {threads}"


def place_rank(config: Config, mesh: Mesh) -> Placed:
    """Take a device, and have messages lie where MPI reads them. Collective over the mesh. Raises ConfigError."""
    taken = take(config.run.device, mesh.world, mesh.node)
    check_codecs(config, mesh, taken.device)
    threads = torch.get_num_threads()
    peak_tflops = on_root(mesh.world, lambda: peak_of(config, taken.facts, threads))
    reach = None
    if taken.device.type != "cpu" and mesh.world.size > 1:
        reach = gpu_aware(mesh.world, taken.device, config.communication.gpu_aware)
        let_mpi_read_devices(reach.direct)
    return Placed(taken.device, taken.facts, taken.ranks, reach, peak_tflops)


def check_codecs(config: Config, mesh: Mesh, device: torch.device) -> None:
    """Raises ConfigError for traffic of this mesh whose codec has nothing that runs on the device."""
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
        dtype = torch.float32 if kind == "gradients" else compute_dtype(config)
        try:
            find_codec(name.removesuffix(FEEDBACK), dtype, device.type)
        except ValueError as error:
            raise ConfigError(f"communication.{kind} = {name!r} (or communication.policy): {error}") from error
