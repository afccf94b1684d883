"""Whether MPI reads a device's memory is tried out, and an MPI that dies of it takes only a child with it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest_mpi import parallel_assert

from hpcllm.mpi import buffers
from hpcllm.mpi.gpu_aware import (
    ALL_PAIRS,
    CASES,
    CUDA,
    HIP,
    LEVEL_ZERO,
    MPI_IS_UP,
    STARTED,
    DeviceAccess,
    _verdict,
    gpu_aware,
    library_says,
    shifts,
    try_between_ranks,
    try_in_child,
)
from hpcllm.mpi.gpu_aware_marker import ADVICE, MARKER

DEVICE = "pretend:0"
MPI_UP = f"{MPI_IS_UP}\n".encode()
UP = MPI_UP + f"{STARTED}\n".encode()
EXCLUSIVE = b"CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
def test_it_is_found_out_by_sending(comm):
    found = gpu_aware(comm, torch.device(DEVICE))
    assert found.direct == (os.environ["HPCLLM_PRETEND"] == "open")
    assert found.why == (
        "device memory was sent and came right"
        if found.direct
        else "a child process that sent device memory died of SIGSEGV"
    )
    assert len(set(comm.allgather(found))) == 1


@pytest.mark.pretend("open")
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("ranks_a_node", [1, 2, 3])
def test_each_pair_of_ranks_of_a_node_and_of_nodes_is_tried(comm, ranks_a_node, monkeypatch):
    """Of few: ranks of a node all meet, and those of one place in their nodes, one of the two sends first."""
    sent, send = set(), buffers.isend

    def isend(ring, tensor, peer, tag):
        sent.add((int(ring.group.Translate_ranks([peer], comm.group)[0]), tensor.nbytes, tensor.data_ptr() % 2))
        return send(ring, tensor, peer, tag)

    monkeypatch.setattr(buffers, "isend", isend)
    number, place = divmod(comm.rank, ranks_a_node)
    node = comm.Split(number)
    found = try_between_ranks(comm, node, torch.device(DEVICE))
    parallel_assert(found == DeviceAccess(True, "device memory was sent and came right"))
    members = [rank for rank in range(comm.size) if rank // ranks_a_node == number]
    places = range(place, comm.size, ranks_a_node)
    peers = {
        ring[(at + shift) % len(ring)]
        for ring, at in ((members, place), (places, number))
        for shift in shifts(len(ring))
    }
    for ring in (members, places):
        met = {frozenset((one, (one + shift) % len(ring))) for one in range(len(ring)) for shift in shifts(len(ring))}
        parallel_assert(met >= set(map(frozenset, itertools.combinations(range(len(ring)), 2))))
    parallel_assert(sent == {(peer, size_bytes, at % 2) for peer in peers for size_bytes, at in CASES})
    parallel_assert(max(size_bytes for _, size_bytes, _ in sent) == 64 << 20)
    parallel_assert(any(odd for *_, odd in sent))
    node.Free()


@given(ranks=st.integers(1, 20_000))
def test_each_rank_meets_all_of_few_and_some_at_every_distance_of_many(ranks):
    found = shifts(ranks)
    assert found[0] == 1
    met = {shift % ranks for shift in found} | {-shift % ranks for shift in found}
    if ranks <= ALL_PAIRS:
        assert met | {0} == set(range(ranks))
    else:
        assert len(found) <= ranks.bit_length()
        assert all(any(distance / 2 < shift <= distance for shift in found) for distance in range(1, ranks))


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_trial_that_was_lived_through_leaves_no_marker(comm, shared_path, is_there):
    folder = shared_path / "r"
    if is_there and comm.rank == 0:
        folder.mkdir()
    comm.Barrier()
    for _ in range(2):
        found = gpu_aware(comm, torch.device(DEVICE), folder=folder)
        comm.Barrier()
        parallel_assert(found.direct == (os.environ["HPCLLM_PRETEND"] == "open"))
        parallel_assert(folder.exists() == is_there)
        parallel_assert(not is_there or not list(folder.iterdir()))


START = """
import sys
from pathlib import Path
import torch
from mpi4py import MPI
from hpcllm.mpi import gpu_aware, gpu_aware_marker
gpu_aware.try_in_child = lambda device: gpu_aware.DeviceAccess(True, "a copy inside the library")
gpu_aware_marker._library = lambda: sys.argv[2]
print(gpu_aware.gpu_aware(MPI.COMM_WORLD, torch.device("pretend:0"), folder=Path(sys.argv[1])))
"""


def start(folder, library: str) -> subprocess.CompletedProcess[str]:
    """A start whose library serves a rank's messages to itself by copies, and crashes on those between ranks."""
    command = [sys.executable, "-c", START, str(folder), library]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.full(reason="starts six processes, an eighth of a minute", in_ci=True)
@pytest.mark.pretend("sealed")
def test_a_library_that_crashes_costs_one_start(tmp_path):
    died = start(tmp_path / "r", "one")
    assert died.returncode < 0
    assert "if the job ends here, start it again" in died.stderr
    marker = tmp_path / "r" / MARKER
    assert "died of that" in marker.read_text()
    for _ in range(2):
        lives = start(tmp_path / "r", "one")
        assert lives.returncode == 0, lives.stderr
        assert "direct=False" in lives.stdout
        assert f"did not live through sending it; delete {marker} to try again; {ADVICE}" in lives.stdout
    assert start(tmp_path / "r", "another library").returncode < 0
    marker.unlink()
    assert start(tmp_path / "r", "another library").returncode < 0


@pytest.mark.parallel([1, 2])
def test_without_a_device_or_with_a_wish_nothing_is_tried(comm):
    assert gpu_aware(comm, torch.device("cpu")) == DeviceAccess(False, "the values are on the CPU")
    for wish in ("yes", "no"):
        assert gpu_aware(comm, torch.device("cuda:0"), wish) == DeviceAccess(
            wish == "yes", f'communication.gpu_aware = "{wish}"'
        )


def test_a_child_that_cannot_have_the_device_says_so_and_nothing_of_mpi():
    """As where the driver lets one process have it: here there is none, or it is none of the library's."""
    found = try_in_child(torch.device("cuda:0"))
    assert not found.direct or torch.cuda.is_available()
    assert torch.cuda.is_available() or found.why.startswith(
        "a child process could not use the device beside this one ("
    )


@pytest.mark.parametrize(
    ("code", "output", "direct", "why"),
    [
        (0, UP, True, "came back right"),
        (-11, UP, False, "died of SIGSEGV"),
        (-6, UP, False, "died of SIGABRT"),
        (None, UP, False, "did not end"),
        (1, UP + b"256 bytes came wrong\n", False, "could not send device memory: 256 bytes came wrong"),
        (1, b"", False, "could not start MPI by itself, and the library does not say"),
        (-11, b"", False, "could not start MPI by itself"),
        (1, MPI_UP + EXCLUSIVE, False, "could not use the device beside this one (CUDA error: CUDA-capable device(s)"),
        (1, MPI_UP + EXCLUSIVE, False, "as in the compute mode EXCLUSIVE_PROCESS: nvidia-smi --compute-mode=DEFAULT"),
        (1, MPI_UP + b"out of memory\n", False, "beside this one (out of memory), and the library does not say"),
        (-11, MPI_UP, False, "could not use the device beside this one, and the library does not say"),
        (None, MPI_UP, False, "could not use the device beside this one, and the library does not say"),
    ],
)
def test_how_the_child_ended_is_what_is_believed(code, output, direct, why):
    found = _verdict(code, output, torch.device("meta"))
    assert found.direct == direct
    assert why in found.why


def no_function(_name, *_arguments):
    return None


@pytest.mark.parametrize(
    ("version", "kind", "environment", "mapped", "call", "says"),
    [
        ("CRAY MPICH version 8.1.31", HIP, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "/libmpi_gtl_hsa.so", no_function, True),
        ("CRAY MPICH version 8.1.31", HIP, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "", no_function, False),
        ("CRAY MPICH version 8.1.31", HIP, {}, "/libmpi_gtl_hsa.so", no_function, False),
        ("Open MPI v5.0.8", CUDA, {}, "", lambda name: 1 if name == "MPIX_Query_cuda_support" else None, True),
        ("Open MPI v5.0.8", HIP, {}, "", lambda name: 0 if name == "MPIX_Query_rocm_support" else None, False),
        ("Open MPI v4.1.4", HIP, {}, "", no_function, None),
        ("Open MPI v5.0.8", LEVEL_ZERO, {}, "", no_function, None),
        ("MPICH Version: 4.2", CUDA, {}, "", lambda *_: 1, False),
        ("MPICH Version: 4.2", CUDA, {}, "", no_function, None),
        ("MPICH Version: 4.2", None, {}, "", no_function, None),
    ],
)
def test_what_libraries_say_of_themselves(version, kind, environment, mapped, call, says):
    assert library_says(version, kind, environment, mapped, call) is says


def test_this_library_is_asked_by_the_name_that_it_has():
    from mpi4py import MPI

    from hpcllm.mpi.gpu_aware import _call, mpi_libraries

    version = MPI.Get_library_version()
    if "Open MPI" in version or version.startswith("MPICH"):
        assert library_says(version, CUDA, os.environ, " ".join(mpi_libraries()), _call) in (True, False)
