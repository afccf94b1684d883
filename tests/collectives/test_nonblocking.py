"""Handles: the blocking form's result, in order, beside blocking collectives; a failure is raised by wait()."""

from __future__ import annotations

import time

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import (
    allreduce,
    group_of,
    iallgather,
    iallreduce,
    ialltoall,
    ibroadcast,
    ireduce_scatter,
)  # fmt: skip
from hpcllm.collectives.worker import can_thread
from hpcllm.errors import CollectiveError, StallError
from hpcllm.mpi.wait import Waits


@pytest.mark.parallel([1, 2, 3])
def test_results_are_those_of_the_blocking_forms(comm):
    size, rank = comm.size, comm.rank
    ones = np.ones(4 * size, "f4")
    assert np.array_equal(iallreduce(ones.copy(), comm).wait(), size * ones)
    assert np.array_equal(ireduce_scatter(ones, comm).wait(), size * ones[:4])
    assert np.array_equal(iallgather(np.array([rank]), comm).wait(), np.arange(size))
    assert np.array_equal(ialltoall(np.full(size, rank), comm).wait(), np.arange(size))
    assert np.array_equal(ibroadcast(np.full(3, rank), comm, size - 1).wait(), np.full(3, size - 1))


@pytest.mark.parallel([1, 2, 3, 4])
def test_many_at_once_beside_blocking_ones_on_the_same_communicator(comm):
    xs = [laws.values(comm.rank, 5000 + i, torch.float32) for i in range(20)]
    want = [allreduce(x.clone(), laws.limited(comm), algorithm="ring") for x in xs]
    handles = []
    for x in xs:
        handles.append(iallreduce(x.clone(), comm, algorithm="ring"))
        assert torch.equal(allreduce(x.clone(), comm, algorithm="ring"), want[len(handles) - 1])
    for handle, expected in zip(reversed(handles), reversed(want), strict=True):
        assert torch.equal(handle.wait(), expected)
        assert handle.done()


@pytest.mark.parallel([2])
def test_the_caller_goes_on_meanwhile(comm):
    laws.limited(comm)
    iallreduce(torch.zeros(1), comm).wait()  # the first one is collective
    if comm.rank == 0:
        handle = iallreduce(torch.ones(10), comm)
        assert not handle.done()  # the other rank waits for the message below
        comm.Send(np.zeros(1), 1, 0)
    else:
        comm.Recv(np.zeros(1), 0, 0)
        handle = iallreduce(torch.ones(10), comm)
    assert handle.wait().tolist() == [2.0] * 10


@pytest.mark.parallel([2])
def test_a_failure_is_raised_by_wait_and_later_ones_are_refused(comm):
    iallreduce(torch.zeros(1), comm).wait()
    with pytest.raises(ValueError, match="got list"):
        iallreduce([1], comm).wait()
    if comm.rank == 0:
        group_of(comm).wire.waits = Waits(0.2)
        first, second = iallreduce(torch.ones(1000), comm, "bf16", "two_step"), iallreduce(torch.ones(10), comm)
        with pytest.raises(StallError, match="from rank 1"):
            first.wait()
        with pytest.raises(CollectiveError, match="earlier"):
            second.wait()
        start = time.perf_counter()
        with pytest.raises(StallError):
            first.wait()
        assert time.perf_counter() - start < 0.1
    comm.Barrier()


@pytest.mark.parallel([2])
def test_without_threads_it_is_done_at_once(comm, monkeypatch):
    monkeypatch.setattr("hpcllm.collectives.nonblocking.can_thread", lambda: False)
    handle = iallreduce(torch.ones(3), laws.limited(comm))
    assert handle.done()
    assert handle.wait().tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="int9"):
        iallreduce(torch.ones(3), comm, "int9").wait()


@pytest.mark.parallel([2, 3])
def test_lanes_do_not_wait_for_each_other_though_ranks_start_them_in_another_order(comm):
    if not can_thread():
        pytest.skip("this MPI runs them at once")
    other = laws.limited(comm.Dup())
    starts = [(laws.limited(comm), "gradients", 1.0), (other, "tensor", 10.0), (comm, "parameters", 100.0)]
    firsts = [iallreduce(torch.zeros(50_000), communicator, lane=lane) for communicator, lane, _ in starts]
    for first in firsts:  # which is collective: so in one order
        first.wait()
    for n in (3, 50_000):
        handles = {}
        for communicator, lane, value in starts if comm.rank else reversed(starts):
            handles[value] = iallreduce(torch.full((n,), value), communicator, lane=lane)
            comm.Barrier()  # in one lane, this order would never end
        for value, handle in handles.items():
            assert handle.wait().eq(value * comm.size).all()
    other.Free()


@pytest.mark.parallel([2])
def test_a_lane_goes_on_while_another_waits(comm):
    laws.limited(comm)
    for lane in ("gradients", "tensor"):
        iallreduce(torch.zeros(1), comm, lane=lane).wait()
    if comm.rank == 0:
        slow = iallreduce(torch.ones(10), comm)
        assert iallreduce(torch.ones(5), comm, lane="tensor").wait().eq(2).all()
        assert not slow.done()
        comm.Barrier()
    else:
        assert iallreduce(torch.ones(5), comm, lane="tensor").wait().eq(2).all()
        comm.Barrier()
        slow = iallreduce(torch.ones(10), comm)
    assert slow.wait().eq(2).all()
