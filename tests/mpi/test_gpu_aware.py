"""Whether MPI reads a device's memory is tried out, and an MPI that dies of it takes only a child with it."""

from __future__ import annotations

import os

import pytest
import torch

from hpcllm.mpi.gpu_aware import (
    CUDA,
    HIP,
    LEVEL_ZERO,
    STARTED,
    DeviceAccess,
    _verdict,
    gpu_aware,
    library_says,
    try_in_child,
)

DEVICE = "pretend:0"
UP = f"{STARTED}\n".encode()


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


@pytest.mark.parallel([1, 2])
def test_without_a_device_or_with_a_wish_nothing_is_tried(comm):
    assert gpu_aware(comm, torch.device("cpu")) == DeviceAccess(False, "the values are on the CPU")
    for wish in ("yes", "no"):
        assert gpu_aware(comm, torch.device("cuda:0"), wish) == DeviceAccess(
            wish == "yes", f'communication.gpu_aware = "{wish}"'
        )


def test_a_child_that_does_not_come_up_says_nothing_of_the_device():
    found = try_in_child(torch.device("cuda:0"))  # there is none, or it is none of the library's
    assert not found.direct or torch.cuda.is_available()


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
