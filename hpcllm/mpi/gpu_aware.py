"""Can this MPI read a device's memory? Tried by sending some, in a process that may die of it.

    communication.gpu_aware
    yes, no      as the user says
    auto         1  first rank of each node: a child process, an MPI job of its own, sends device memory to itself
                       lives, and the bytes are right     go on
                       dies, hangs, or they are wrong     no: messages go through pinned host memory
                       cannot start MPI by itself, or
                       use the device beside this rank    what the library says about itself
                 2  every rank sends device memory to others of its node, so that each pair meets, and to ranks of its
                    place on other nodes, 1, 2, 4, ... further on, by every card: small, 64 MiB, from odd addresses;
                    all bytes are right    yes

    node 0   rank 0 -> rank 1 -> rank 0        a library may copy what a rank sends to itself, map the memory of ranks
               v         v                     of a node (which control groups may forbid), and let cards read it
    node 1   rank 2 -> rank 3 -> rank 2        between nodes: three paths, and each may fail alone

A library that crashes in 2 takes the job with it, once: see gpu_aware_marker.py.

An MPI that is not GPU-aware takes the address for one of the CPU, and the process dies of SIGSEGV: a flag that says so
may be missing, wrong, or about another build, so it is tried. The child is started by vfork and exec, never a fork of a
process in which MPI runs: `python -m hpcllm.mpi.gpu_aware DEVICE`. Ranks of other nodes wait asleep.
Sources of what libraries say: Open MPI, MPIX_Query_cuda_support(3) and MPIX_Query_rocm_support(3); MPICH,
MPIX_GPU_query_support(3); HPE Cray MPI, intro_mpi(3), MPICH_GPU_SUPPORT_ENABLED.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from mpi4py import MPI

import hpcllm
from hpcllm.errors import StallError
from hpcllm.mpi import buffers
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.gpu_aware_marker import Marker
from hpcllm.mpi.wait import Waits, name_rank

# bytes, and where they begin in their allocation: eager; by rendezvous, between processes by mapped memory; unaligned,
# as parts of flat buffers are; large, in pieces of a library's own
CASES = ((256, 0), (4 << 20, 0), ((4 << 20) + 3, 5), (64 << 20, 513))
# what a child prints, so that its end says something of the right one
MPI_IS_UP = "mpi is up"  # before it touches the device
STARTED = "started"  # MPI and the device are up
BUSY = "busy or unavailable"  # in CUDA's words for a device that another process has for itself
TRIAL_LIMIT_S = 120.0  # of a child that reads PyTorch from a slow file system
EXCHANGE_LIMIT_S = 60.0
# what launchers and batch systems tell a process of the job that it belongs to
OF_A_JOB = (
    "PMI_", "PMI2_", "PMIX_", "PALS_", "ALPS_", "HYDRA_", "HYDI_", "PRTE_", "SLURM_", "FLUX_", "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_NUM_", "OMPI_MCA_orte_", "OMPI_MCA_ess_",
    "OMPI_MCA_pmix", "MPI_LOCAL",
)  # fmt: skip
ALL_PAIRS = 16  # ranks that share a node, and nodes: each pair of so many is tried
PERIOD = 251  # of the bytes that are sent: a prime, so that no piece of a power of two looks like its neighbour
CUDA, LEVEL_ZERO, HIP = range(3)  # MPICH's numbers of what a GPU is programmed by
_given_up: list[torch.Tensor] = []  # memory of messages that may still be on their way


@dataclass(frozen=True)
class DeviceAccess:
    """Result of the trials. direct: MPI reads memory of the device. why: for people, without a full stop."""

    direct: bool
    why: str
    pending: bool = False  # messages of the trial may still be on their way, on some rank


def gpu_aware(
    comm: MPI.Intracomm, device: torch.device, setting: str = "auto", folder: Path | None = None
) -> DeviceAccess:
    """Find out if MPI reads memory of this device, on every rank; for message_memory.let_mpi_read_devices.

    device: of this rank. setting: communication.gpu_aware. folder: of a run, where a marker lies while ranks try; None:
    a start that dies of it tells the next one nothing. Collective over comm; takes a second or more. Never raises for
    what it finds.
    """
    if setting != "auto":
        return DeviceAccess(setting == "yes", f'communication.gpu_aware = "{setting}"')
    marker = Marker(folder) if folder else None
    if left := on_root(comm, marker.left_behind) if marker else "":
        return DeviceAccess(False, left)
    own = comm.Dup()
    node = cast(MPI.Intracomm, own.Split_type(MPI.COMM_TYPE_SHARED, own.rank))
    mine = DeviceAccess(device.type != "cpu", "the values are on the CPU")
    found = _agreed(own, try_in_child(device) if node.rank == 0 and mine.direct else mine)
    if found.direct:
        found = _try_marked(own, node, device, marker)
    if not found.pending:
        node.Free()
        own.Free()
    return found


def _try_marked(comm: MPI.Intracomm, node: MPI.Intracomm, device: torch.device, marker: Marker | None) -> DeviceAccess:
    """Try between ranks, the marker on disk meanwhile, and after it if ranks hang. Collective over comm."""
    if marker:
        on_root(comm, marker.begin)
    found = try_between_ranks(comm, node, device)
    if marker and comm.rank == 0 and not found.pending:
        marker.end()
    return found


def try_between_ranks(comm: MPI.Intracomm, node: MPI.Intracomm, device: torch.device) -> DeviceAccess:
    """Try ranks of a node with one another, then ranks that have one place in their nodes.

    node: the ranks of comm that share memory with this one. Collective over comm.
    """
    found = _agreed(comm, _try_in_ring(node, device))
    if found.direct:
        places = cast(MPI.Intracomm, comm.Split(node.rank, comm.rank))
        found = _agreed(comm, _try_in_ring(places, device))
        if not found.pending:
            places.Free()
    return found


def _agreed(comm: MPI.Intracomm, mine: DeviceAccess) -> DeviceAccess:
    """Return the first rank's no, or rank 0's yes if there is no no. Collective over comm; waits asleep."""
    waits = Waits(2 * TRIAL_LIMIT_S)
    first = np.array([comm.size if mine.direct else comm.rank, -int(mine.pending)])
    waits.allreduce(comm, first, lambda: f"{comm.size} ranks to try GPU-aware MPI", MPI.MIN)
    root = int(first[0]) % comm.size
    direct, why = comm.bcast((mine.direct, mine.why) if comm.rank == root else None, root)
    return DeviceAccess(direct, f"{name_rank(comm, root)}: {why}" if root and not direct else why, bool(first[1]))


def try_in_child(device: torch.device, limit_s: float = TRIAL_LIMIT_S) -> DeviceAccess:
    """Return what a child process found that sends memory of the device to itself. Not collective."""
    command = [sys.executable, "-m", "hpcllm.mpi.gpu_aware", str(device)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}
    package = str(Path(hpcllm.__file__).resolve().parent.parent)  # however this process came to find it
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    try:
        child = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        return _verdict(None, error.stdout or b"", device)
    except OSError as error:
        return _by_library(device, f"no child process could be started ({error.strerror})")
    return _verdict(child.returncode, child.stdout, device)


def _verdict(code: int | None, output: bytes, device: torch.device) -> DeviceAccess:
    """code: exit code of the child, None if it was stopped at the limit."""
    words = output.decode(errors="replace").splitlines()
    if MPI_IS_UP not in words:
        return _by_library(device, "a child process could not start MPI by itself")
    if STARTED not in words:
        return _by_library(device, f"a child process could not use the device beside this one{_why_unused(words[-1])}")
    if code == 0:
        return DeviceAccess(True, "device memory was sent and came back right")
    if code is None:
        return DeviceAccess(False, "a child process that sent device memory did not end")
    if code < 0:
        return DeviceAccess(False, f"a child process that sent device memory died of {signal.Signals(-code).name}")
    return DeviceAccess(False, f"a child process could not send device memory: {words[-1]}")


def _why_unused(said: str) -> str:
    """Return what stands behind "could not use the device" in a verdict. said: the child's last words."""
    mode = ", as in the compute mode EXCLUSIVE_PROCESS: nvidia-smi --compute-mode=DEFAULT, by the site, or NVIDIA's MPS"
    return "" if said == MPI_IS_UP else f" ({said}){mode if BUSY in said else ''}"


def _try_in_ring(comm: MPI.Intracomm, device: torch.device) -> DeviceAccess:
    """Send device memory to ranks further on and receive that of ranks before, see shifts. Collective over comm."""
    for size_bytes, offset in CASES:
        sent, landing = _pair(size_bytes, offset, comm.rank, device)
        for shift in shifts(comm.size):
            landing.zero_()
            torch.accelerator.synchronize(device)
            found = _exchange(comm, sent, landing, shift)
            if not found.direct:
                return found
    return DeviceAccess(True, "device memory was sent and came right")


def shifts(ranks: int) -> list[int]:
    """Return how far ranks in a ring send: up to ALL_PAIRS of them so that each pair meets, else 1, 2, 4, ..."""
    if ranks <= ALL_PAIRS:
        return list(range(1, max(1, ranks // 2) + 1))
    return [1 << power for power in range((ranks - 1).bit_length())]


def _exchange(comm: MPI.Intracomm, sent: torch.Tensor, landing: torch.Tensor, shift: int) -> DeviceAccess:
    """Send to the rank `shift` further on, receive from the one as far before. Collective over comm."""
    right, left = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
    try:
        requests = buffers.irecv(comm, landing, left, 0) + buffers.isend(comm, sent, right, 0)
        Waits(EXCHANGE_LIMIT_S).all(requests, lambda: f"device memory from {name_rank(comm, left)}")
    except StallError:
        _given_up.extend((sent, landing))
        return DeviceAccess(
            False, f"device memory from {name_rank(comm, left)} did not come in {EXCHANGE_LIMIT_S:g} s", True
        )
    except MPI.Exception as error:
        return DeviceAccess(False, f"MPI did not take device memory: {error.Get_error_string()}")
    if not torch.equal(landing.cpu(), _pattern(sent.numel(), left)):
        return DeviceAccess(False, f"{sent.numel()} bytes of device memory from {name_rank(comm, left)} came wrong")
    return DeviceAccess(True, "device memory was sent and came right")


def _by_library(device: torch.device, cause: str) -> DeviceAccess:
    cuda = HIP if torch.version.hip else CUDA
    kind = {"cuda": cuda, "xpu": LEVEL_ZERO}.get(device.type)
    says = library_says(MPI.Get_library_version(), kind, os.environ, " ".join(mpi_libraries()), _call)
    if says is None:
        return DeviceAccess(False, f"{cause}, and the library does not say that it is GPU-aware")
    return DeviceAccess(says, f"{cause}; the library says {'yes' if says else 'no'}")


def library_says(
    version: str, kind: int | None, environment: Mapping[str, str], mapped: str, call: Callable[..., int | None]
) -> bool | None:
    """Return what the MPI library says of devices of that kind (CUDA, HIP, ...), None for nothing. Pure but for `call`.

    version: MPI's text. mapped: paths of its loaded files. call(name, *arguments): a C function of the library's,
    None if it has none of that name.
    """
    if "CRAY MPICH" in version.upper():
        return environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and "libmpi_gtl_" in mapped
    if kind is None:
        return None
    if "Open MPI" in version:
        answer = call({CUDA: "MPIX_Query_cuda_support", HIP: "MPIX_Query_rocm_support"}.get(kind, ""))
        return None if answer is None else answer == 1
    flag = ctypes.c_int(0)
    failed = call("MPIX_GPU_query_support", ctypes.c_int(kind), ctypes.byref(flag))
    return None if failed is None else not failed and flag.value == 1


def _call(name: str, *arguments: object) -> int | None:
    """Call a C function of the MPI library in this process; None if there is none of that name."""
    for path in [None, *mpi_libraries()]:
        try:
            answer: int = getattr(ctypes.CDLL(path), name)(*arguments)
        except (OSError, AttributeError, ValueError):
            continue
        return answer
    return None


def mpi_libraries() -> list[str]:
    """Return the paths of loaded files whose names begin with libmpi, sorted; [] where the kernel does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            found = {line[line.index("/") :].strip() for line in lines if "/libmpi" in line}
    except OSError:
        return []
    return sorted(found)


def _pattern(size_bytes: int, seed: int) -> torch.Tensor:
    """Return (size_bytes,) uint8 on the CPU, different for each seed."""
    period = ((torch.arange(PERIOD) * 7 + 31 * seed + 1) % PERIOD).to(torch.uint8)
    return period.repeat(-(-size_bytes // PERIOD))[:size_bytes]


def _pair(size_bytes: int, offset: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (size_bytes,) uint8 on the device twice, the pattern and zeros, `offset` behind an allocation's start."""
    sent, landing = (torch.zeros(offset + size_bytes, dtype=torch.uint8).to(device)[offset:] for _ in range(2))
    sent.copy_(_pattern(size_bytes, seed))
    return sent, landing


def _send_to_oneself(device: torch.device) -> int:
    """Send memory of the device to this process itself, perhaps to die of it; return the exit code. A child's work."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(MPI_IS_UP, flush=True)  # by the import of MPI
    try:
        torch.accelerator.set_device_index(device)
        pairs = [_pair(size_bytes, offset, 0, device) for size_bytes, offset in CASES]
        torch.accelerator.synchronize(device)
    except RuntimeError as error:  # of the driver's
        print(str(error).partition("\n")[0], flush=True)
        return 1
    print(STARTED, flush=True)
    for data, landing in pairs:
        MPI.Request.Waitall(buffers.irecv(MPI.COMM_SELF, landing, 0, 0) + buffers.isend(MPI.COMM_SELF, data, 0, 0))
        if not torch.equal(landing.cpu(), data.cpu()):
            print(f"{data.numel()} bytes came wrong", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_send_to_oneself(torch.device(sys.argv[1])))
