"""The front doors: kinds of arrays, what is refused and how, what is kept with a communicator."""

from __future__ import annotations

import contextlib

import laws
import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import allgather, allreduce, alltoall, broadcast, group_of, reduce_scatter
from hpcllm.collectives.group import make_group
from hpcllm.errors import StallError
from hpcllm.mpi.partition import chunk_range
from hpcllm.mpi.wait import Waits


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_numpy_arrays_are_summed_where_they_are(comm, dtype):
    x = np.arange(12, dtype=dtype).reshape(3, 4)
    for _ in range(3):  # from the second time on a short cut may be taken
        x[:] = np.arange(12).reshape(3, 4)
        assert allreduce(x, comm) is x
        assert np.array_equal(x, comm.size * np.arange(12).reshape(3, 4))


@pytest.mark.parallel([1, 2, 3])
def test_every_operation_answers_in_the_caller_s_kind(comm):
    for x in (np.ones((6, comm.size), "f4"), torch.ones(6, comm.size)):
        for result in (
            allreduce(x, comm), reduce_scatter(x, comm), allgather(x, comm), alltoall(x, comm), broadcast(x, comm)
        ):  # fmt: skip
            assert type(result) is type(x)
            assert result.dtype == x.dtype


def as_kind(kind, values):
    """A copy as a NumPy array, a tensor, or as kinds that need the general way: followed by autograd, read-only."""
    x = np.array(values, dtype="f4")
    x.flags.writeable = kind != "read-only"
    return x if kind in ("numpy", "read-only") else torch.from_numpy(x).requires_grad_(kind == "followed")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kinds", [("numpy",), ("torch",), ("torch", "numpy", "followed"), ("read-only", "torch")])
@pytest.mark.parametrize("with_out", [False, True])
def test_ranks_may_bring_different_kinds_of_arrays_again_and_again(comm, kinds, with_out):
    """From the second time on some take the short way to the library (library_calls.py), and others do not."""
    group, kind = make_group(comm), kinds[comm.rank % len(kinds)]
    written = "numpy" if kind == "read-only" else kind
    x = np.arange(4 * comm.size)
    every = [x + 100 * rank for rank in range(comm.size)]  # what the ranks bring
    mine, own = every[comm.rank], slice(4 * comm.rank, 4 * comm.rank + 4)
    uneven = [np.append(each, 7) for each in every]  # chunks of different lengths
    moving = {  # operation: what is brought, the result
        reduce_scatter: (uneven[comm.rank], sum(uneven)[slice(*chunk_range(x.size + 1, comm.size, comm.rank))]),
        allgather: (mine[own], np.concatenate([each[4 * r : 4 * r + 4] for r, each in enumerate(every)])),
        alltoall: (mine, np.concatenate([each[own] for each in every])),
    }
    for _ in range(3):
        for operation, (brought, expected) in moving.items():
            out = as_kind(written.replace("followed", "torch"), 0 * expected) if with_out else None
            assert np.array_equal(operation(as_kind(kind, brought), group, out=out), expected)
        assert np.array_equal(allreduce(as_kind(written, mine), group).tolist(), sum(every))
        assert np.array_equal(broadcast(as_kind(written, mine), group, comm.size - 1).tolist(), every[-1])
    assert {plan.algorithm for plan in group.plans.values()} == {"native"}
    group.free()


@pytest.mark.parallel([1, 2, 3])
def test_tensors_that_stay_that_move_and_others_at_their_place(comm):
    """The short way knows tensors by where they lie: others there, of another length or type, are told apart."""
    group, ranks = make_group(comm), range(comm.size)
    memory, landing = torch.zeros(64), torch.zeros(64)
    for start, length in [(0, 4), (0, 4), (0, 4), (7, 4), (0, 5), (0, 4), (7, 4), (0, 5)]:
        n = length * comm.size
        x, out = memory[start : start + n], landing[start : start + n]
        every = [torch.arange(n, dtype=torch.float32) + 100 * rank for rank in ranks]
        own = slice(comm.rank * length, comm.rank * length + length)
        for dtype in (torch.float32, torch.int32):  # moved, never added up
            x.view(dtype).copy_(every[comm.rank])
            found = alltoall(x.view(dtype), group, out=out.view(dtype))
            assert torch.equal(found, torch.cat([each[own] for each in every]).to(dtype))
        x.copy_(every[comm.rank])
        assert torch.equal(reduce_scatter(x, group, out=out[:length]), sum(every)[own])
        assert torch.equal(allgather(x[:length], group, out=out), torch.cat([each[:length] for each in every]))
        with pytest.raises(ValueError, match="shares memory with x"):
            alltoall(x, group, out=memory[start + 1 : start + 1 + n])
        assert torch.equal(allreduce(x, group), sum(every))
    group.choose_anew()
    assert not group.ready_calls
    group.free()


@pytest.mark.parallel([2, 3])
def test_a_codec_that_was_not_taken_costs_no_more_than_none(comm):
    """Where `auto` sends raw values in place of a codec's, the short way is taken; where it runs the codec, never."""
    group, n = make_group(comm, MPI.COMM_SELF), 4 * comm.size  # a node each: small arrays travel raw
    group.wire_gb_s = 0.125
    x, out, large = torch.empty(n), torch.empty(n), torch.empty(1 << 18)
    for _ in range(3):
        x.copy_(torch.arange(n) + 100 * comm.rank)
        alltoall(x, group, "int8", out=out)
        assert torch.equal(out, torch.cat([torch.arange(4) + 4 * comm.rank + 100 * rank for rank in range(comm.size)]))
        allreduce(x, group, "int8")
        assert torch.equal(x, comm.size * torch.arange(n) + 100.0 * sum(range(comm.size)))
        allreduce(large.fill_(1), group, "int8")
    assert [key[:2] for key in group.ready_calls] == [("alltoall", "int8"), ("allreduce", "int8")]
    assert group.plans["allreduce", large.numel(), "int8", torch.float32, "cpu"].codec.name == "int8:256"
    group.free()


@pytest.mark.parallel([1, 2])
def test_communicators_that_take_turns_have_a_group_each_until_they_are_freed(comm):
    one, other = comm.Dup(), comm.Dup()
    groups = [group_of(each) for each in (one, other)]
    assert groups[0] is not groups[1]
    for _ in range(2):
        assert [group_of(each) for each in (one, one, other)] == [groups[0], *groups]
    one.Free()
    with pytest.raises(MPI.Exception):
        group_of(one)
    assert group_of(other) is groups[1]
    other.Free()
    with pytest.raises(MPI.Exception):  # the one that was asked for last
        group_of(other)


@pytest.mark.parallel([2])
def test_waits_with_a_limit_have_it_the_second_time_too(comm):
    """The short way to the library is for waits without one: its blocking call would wait for ever."""
    late = comm.Dup()  # not freed, as in test_allreduce.py
    group, x = group_of(late), np.ones(100_000, "f4")
    group.wire.waits = Waits(limit_s=20.0)
    alltoall(x, late)  # the plan is known from here on
    if comm.rank == 0:
        group.wire.waits = Waits(limit_s=0.2)
        with pytest.raises(StallError, match=r"waited 0\.2 s for the library's alltoall"):
            alltoall(x, late)
    comm.Barrier()
    if comm.rank == 1:  # takes part at last
        group.wire.waits = Waits(limit_s=0.2)
        with contextlib.suppress(StallError):
            alltoall(x, late)


@pytest.mark.parallel([1, 2, 3])
def test_empty_and_single_values(comm):
    assert allreduce(np.zeros((0, 3), "f4"), comm).shape == (0, 3)
    assert float(allreduce(torch.tensor(1.0), comm)) == comm.size
    assert allgather(np.array(comm.rank), comm).tolist() == list(range(comm.size))
    assert reduce_scatter(np.zeros(0, "f4"), comm).shape == (0,)


@pytest.mark.parallel([2])
def test_an_array_that_autograd_follows_is_summed_in_place(comm):
    x = torch.ones(5, requires_grad=True)
    assert allreduce(x, comm) is x
    assert x.tolist() == [2.0] * 5


@pytest.mark.parallel([1, 2])
def test_what_cannot_be_done_is_refused(comm):
    with pytest.raises(ValueError, match=r"sums torch\.float32, torch\.bfloat16, torch\.float16, not torch\.float64"):
        allreduce(torch.zeros(4, dtype=torch.float64), comm)
    with pytest.raises(ValueError, match="not contiguous"):
        allreduce(torch.zeros(8)[::2], comm)
    with pytest.raises(ValueError, match="not C-contiguous"):
        allreduce(np.zeros((4, 4), "f4").T, comm)
    with pytest.raises(ValueError, match=r"valid: auto, .*ring.*native"):
        allreduce(torch.zeros(4), comm, algorithm="rnig")
    with pytest.raises(ValueError, match=r"unknown; .*valid: raw, bf16"):
        allreduce(torch.zeros(4), comm, "int9")
    with pytest.raises(ValueError, match="codec bf16 needs another"):
        allreduce(torch.zeros(4), comm, "bf16", "native")
    with pytest.raises(ValueError, match=r"codec bf16 is for torch\.float32, the values are torch\.float16"):
        allreduce(torch.zeros(4, dtype=torch.float16), comm, find_codec("bf16", torch.float32))
    with pytest.raises(ValueError, match="shape"):
        allreduce(torch.zeros(4), comm, out=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"out has 4 values of torch\.float16"):
        allreduce(torch.zeros(4), comm, out=torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="got list"):
        allreduce([1.0, 2.0], comm)
    assert allreduce(torch.ones(4), comm).tolist() == [comm.size] * 4  # nothing of that closed the communicator


@pytest.mark.parallel([1, 2])
def test_read_only_memory_is_read_but_not_written(comm):
    x = np.ones(6, "f4")
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        allreduce(x, comm)
    assert allreduce(x, comm, out=np.empty(6, "f4")).tolist() == [comm.size] * 6
    assert len(allgather(x, comm)) == 6 * comm.size


@pytest.mark.parallel([1, 2, 3])
def test_messages_never_meet_the_caller_s(comm):
    """A message of the caller's own that is on its way, with any tag, is no collective's."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    mine = np.full(3, comm.rank)
    requests = [comm.Isend(mine, right, tag) for tag in range(4)]
    x = torch.full((100,), float(comm.rank))
    allreduce(x, laws.limited(comm), algorithm="ring")
    assert x[0] == sum(range(comm.size))
    for tag in range(4):
        got = np.empty_like(mine)
        comm.Recv(got, left, tag)
        assert got[0] == left
    MPI.Request.Waitall(requests)


@pytest.mark.parallel([1, 2, 3, 4, 5])
def test_nodes_are_numbered_by_their_lowest_rank(comm):
    """Nodes of uneven sizes, whose ranks alternate: ranks 0 3 | 1 | 2 4, sorted backwards inside a node."""
    node_of = [0, 1, 2, 0, 2][comm.rank]
    node = comm.Split(node_of, -comm.rank)
    group = make_group(comm, node)
    nodes = min(comm.size, 3)
    assert group.nodes == nodes == len(group.node_sizes)
    assert sum(group.node_sizes) == comm.size
    numbers = group.node.allgather(group.peers.rank if group.node.rank < group.lanes else None)
    assert {number for number in numbers if number is not None} == {node_of}
    group.free()
    node.Free()


@pytest.mark.parallel([1, 2, 3])
def test_a_freed_communicator_frees_what_was_kept_with_it(comm):
    for _ in range(300):  # an MPI library has a few thousand communicators at most
        own = comm.Dup()
        allreduce(torch.ones(3), own)
        own.Free()


@pytest.mark.parallel([2])
def test_a_limit_changes_no_bit(comm):
    x = laws.values(comm.rank, 5000, torch.float32)
    first = allreduce(x.clone(), comm)
    group_of(comm).wire.waits = Waits(laws.LIMIT_S)
    assert torch.equal(allreduce(x.clone(), comm), first)
