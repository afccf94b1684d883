"""`python -m hpcllm.mpi.gpu_aware_trial DEVICE`: send memory of a device to oneself, perhaps to die of it.

A child process of gpu_aware.py, which reads how it ended. One message is short, one long: libraries send them in two
ways.
"""

from __future__ import annotations

import sys

import torch

SIZES = (256, 4 << 20)  # bytes: eager; by rendezvous, between processes by mapped memory
STARTED = "started"  # printed once MPI and the device are up: what ends the process now says something about both


def pattern(size_bytes: int, seed: int) -> torch.Tensor:
    """Return (size_bytes,) uint8 on the CPU, different for each seed."""
    return ((torch.arange(size_bytes) * 7 + 31 * seed + 1) % 251).to(torch.uint8)


def main() -> int:
    from mpi4py import MPI

    from hpcllm.mpi import buffers

    _leave_no_core()
    device = torch.device(sys.argv[1])
    torch.accelerator.set_device_index(device)
    pairs = [(pattern(size, 0).to(device), torch.zeros(size, dtype=torch.uint8).to(device)) for size in SIZES]
    torch.accelerator.synchronize(device)
    print(STARTED, flush=True)
    for data, landing in pairs:
        requests = buffers.irecv(MPI.COMM_SELF, landing, 0, 0) + buffers.isend(MPI.COMM_SELF, data, 0, 0)
        MPI.Request.Waitall(requests)
        if not torch.equal(landing.cpu(), data.cpu()):
            print(f"{data.numel()} bytes came wrong", flush=True)
            return 1
    return 0


def _leave_no_core() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
