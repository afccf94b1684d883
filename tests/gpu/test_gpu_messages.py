"""Streams and messages: what a kernel has not finished is never sent, what has not arrived is never read."""

from __future__ import annotations

import os

import pytest
import torch
from mpi4py import MPI

from hpcllm.collectives import allgather, allreduce, iallreduce, reduce_scatter
from hpcllm.mpi.gpu_aware import gpu_aware
from hpcllm.mpi.message_memory import let_mpi_read_devices, mpi_reads_devices

DRY = bool(os.environ.get("HPCLLM_GPU_DRY"))
VALUES = (1 << (10 if DRY else 22)) + 5
SIDE = 16 if DRY else 4096  # of the matrices: some milliseconds a product
CODECS = ("raw", "bf16", "int8:256")


@pytest.fixture(scope="session")
def reach(device):
    """What MPI can reach, tried once, which takes seconds."""
    return gpu_aware(MPI.COMM_WORLD, device)


@pytest.fixture(params=["pinned host memory", "device memory"])
def where(request):
    """Where messages lie; memory of the device only if MPI reads that here."""
    before = mpi_reads_devices()
    if request.param == "device memory" and not request.getfixturevalue("reach").direct:
        pytest.skip("this MPI does not read device memory")
    let_mpi_read_devices(request.param == "device memory")
    yield request.param
    let_mpi_read_devices(before)


def late(x: torch.Tensor, value: float) -> torch.Tensor:
    """x, which gets its value long after this returns: the stream first multiplies matrices for some milliseconds."""
    square = torch.ones(SIDE, SIDE, device=x.device)
    for _ in range(8):
        square = square @ square * (1 / SIDE)
    x.copy_(square.view(-1)[0] * value)
    return x


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for what a codec takes; values of another moment are far away, or NaN."""
    torch.testing.assert_close(got, want, rtol=0.02, atol=0)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_sums_wait_for_the_kernels_that_make_their_values(comm, device, where, codec):  # noqa: ARG001
    memory = torch.zeros(VALUES, device=device)
    for round_ in range(5):
        memory.fill_(torch.nan)
        total = allreduce(late(memory, comm.rank + round_ + 1), comm, codec)
        want = sum(rank + round_ + 1 for rank in range(comm.size))
        close(total, torch.full_like(total, want))


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_sums_behind_the_back_leave_the_callers_stream_alone(comm, device, where, codec):  # noqa: ARG001
    first, second = (late(torch.empty(VALUES, device=device), value) for value in (comm.rank + 1.0, 3.0))
    handles = [iallreduce(x, comm, codec) for x in (first, second)]
    other = late(torch.empty(VALUES, device=device), 7.0)  # meanwhile, on the caller's stream
    for handle, want in zip(handles, (comm.size * (comm.size + 1) / 2, 3.0 * comm.size), strict=True):
        close(handle.wait(), torch.full_like(first, want))
    assert torch.equal(other, torch.full_like(other, 7.0))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("codec", CODECS)
def test_parts_come_whole_and_go_on_to_kernels_at_once(comm, device, where, codec):  # noqa: ARG001
    x = late(torch.empty(1024 * comm.size, device=device), 2.0)
    part = reduce_scatter(x, comm, codec)
    whole = allgather(part * (comm.rank + 1), comm, codec)
    want = 2.0 * comm.size * torch.arange(1, comm.size + 1, device=device).repeat_interleave(1024)
    close(whole, want.float())


@pytest.mark.parallel([1, 2, 4])
def test_what_mpi_can_reach_is_found_out_and_said(comm, reach, record_property):
    record_property("GPU-aware", f"{'yes' if reach.direct else 'no'}: {reach.why}")
    assert reach.why
    assert comm.allgather(reach.direct) == [reach.direct] * comm.size
