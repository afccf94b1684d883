"""Reduce-scatter and all-gather in shared memory: the bits of the whole sum, wherever the arrays are."""

from __future__ import annotations

import laws
import pytest
import torch
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import allgather, allreduce, chunk_range, group_of, node, reduce_scatter, shared_zeros
from hpcllm.collectives.group import make_group
from hpcllm.collectives.node_window import node_window_allgather, node_window_reduce_scatter
from hpcllm.collectives.window import free_shared
from hpcllm.errors import StallError
from hpcllm.mpi.wait import Waits

ROOM = 70_200


def sum_of(x: torch.Tensor, comm) -> torch.Tensor:
    """This rank's chunk of what node_window_allreduce makes of x."""
    return allreduce(x.clone(), comm, algorithm="node_window")[slice(*chunk_range(x.numel(), comm.size, comm.rank))]


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_a_chunk_has_the_bits_of_the_whole_sum_and_x_keeps_its_own(comm, dtype):
    shared = shared_zeros(ROOM, laws.limited(comm), dtype)
    for n in laws.window_lengths(comm.size):
        value = laws.values(comm.rank, n, dtype)
        want = sum_of(value, comm)
        for place in laws.PLACES:
            x = laws.at(place, value, shared, comm.rank)
            result = reduce_scatter(x, comm, algorithm="node_window")
            assert laws.bits(result) == laws.bits(want), (n, place)
            assert laws.bits(x) == laws.bits(value), (n, place)
            x.zero_()  # the others must have read it by now
    free_shared(shared, comm)


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_every_part_is_on_every_rank_wherever_it_goes(comm, dtype, in_place):
    shared = shared_zeros(ROOM, laws.limited(comm), dtype)
    for n in laws.window_lengths(comm.size):
        whole = laws.values(0, n, torch.float64).mul(50).to(torch.int64).remainder(200).to(dtype)
        own = slice(*chunk_range(n, comm.size, comm.rank))
        for place in laws.PLACES:
            out = laws.at(place, torch.ones_like(whole), shared, comm.rank)
            if in_place:
                out[own] = whole[own]
            allgather(out[own] if in_place else whole[own].clone(), comm, algorithm="node_window", out=out)
            assert laws.bits(out) == laws.bits(whole), (n, place)
            out.zero_()
    free_shared(shared, comm)


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("far", [False, True])
def test_many_segments_between_cores_that_share_a_cache_or_none(comm, monkeypatch, dtype, far):
    monkeypatch.setattr(node.Node, "_far", lambda *_: far)
    monkeypatch.setattr(node, "SLOT_BYTES", 1024)
    monkeypatch.setattr(node, "SMALL_BYTES", 64 * comm.size)
    own = laws.limited(comm.Dup())
    for n in (33, 257, 20_011, 3):
        x = laws.values(comm.rank, n, dtype)
        want = sum_of(x, own)
        for _ in range(3):
            part = reduce_scatter(x, own, algorithm="node_window")
            assert laws.bits(part) == laws.bits(want), n
            out = allgather(part, own, algorithm="node_window", out=torch.empty_like(x))
            assert laws.bits(out) == laws.bits(allreduce(x.clone(), own, algorithm="node_window")), n
    own.Free()


@pytest.mark.parallel([2, 3])
def test_ranks_that_disagree_are_told_and_can_go_on(comm):
    last = comm.size - 1
    other = allreduce if comm.rank == last else reduce_scatter
    for n in (10, 50_000):
        x = torch.ones(n + (comm.rank == last))
        said = rf"rank 0 in the reduce-scatter of {n} values .* rank {last} in the"
        with pytest.raises(ValueError, match=rf"{said} reduce-scatter of {n + 1} values"):
            reduce_scatter(x, laws.limited(comm), algorithm="node_window")
        with pytest.raises(ValueError, match=rf"{said} sum of {n} values"):
            other(x[:n], comm, algorithm="node_window")
    assert reduce_scatter(torch.ones(50_000), comm, algorithm="node_window").eq(comm.size).all()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("n", [10, 100_000])
def test_a_rank_that_does_not_come_is_named(comm, n):
    own = comm.Dup()
    allreduce(torch.ones(n), laws.limited(own), algorithm="node_window")
    if comm.rank < comm.size - 1:
        group_of(own).wire.waits = Waits(limit_s=0.2)
        with pytest.raises(StallError, match=rf"waited 0\.2 s for rank {comm.size - 1} to come to the all-gather of"):
            allgather(torch.ones(n), own, algorithm="node_window")
    comm.Barrier()


@pytest.mark.parallel([2, 4])
def test_what_cannot_be_done_in_one_node_is_refused(comm):
    x, out = torch.zeros(4 * comm.size), torch.zeros(4)
    with pytest.raises(ValueError, match=r"codec bf16 could encode; use raw, or two_step"):
        reduce_scatter(x, comm, "bf16", "node_window")
    with pytest.raises(ValueError, match=r"codec bf16 could encode; use raw, or ring"):
        allgather(out, comm, "bf16", "node_window")
    group = make_group(comm, MPI.COMM_SELF)
    for function, arguments in ((node_window_reduce_scatter, (x, out)), (node_window_allgather, (out, x))):
        with pytest.raises(ValueError, match=rf"these ranks are on {comm.size}; use (two_step|ring)"):
            function(*arguments, group, find_codec("raw"))
    group.free()
