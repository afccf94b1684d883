"""Sums through shared memory: exactly that in rank order, wherever the array is; late and mistaken ranks are named."""

from __future__ import annotations

import itertools
import time

import laws
import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import allreduce, group_of, node, shared_zeros
from hpcllm.collectives.group import make_group
from hpcllm.collectives.node import node_of, slices
from hpcllm.collectives.node_kernels import KINDS, hand
from hpcllm.collectives.node_window import node_window_allreduce
from hpcllm.collectives.row_sums import sum_rows
from hpcllm.collectives.window import free_shared
from hpcllm.errors import StallError
from hpcllm.mpi.wait import Waits


def rank_order_sum(addends: list[torch.Tensor]) -> torch.Tensor:
    total = addends[0].float()
    for addend in addends[1:]:
        total = total + addend.float()
    return total.to(addends[0].dtype)


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_the_sum_is_that_in_rank_order_wherever_the_array_is(comm, dtype):
    shared = shared_zeros(70_100, laws.limited(comm), dtype)
    for n in laws.window_lengths(comm.size):
        addends = [laws.values(rank, n, dtype) for rank in range(comm.size)]
        want = rank_order_sum(addends)
        for place in laws.PLACES:
            x = laws.at(place, addends[comm.rank], shared, comm.rank)
            assert allreduce(x, comm, algorithm="node_window") is x
            assert laws.bits(x) == laws.bits(want), (n, place)
    free_shared(shared, comm)


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("far", [False, True])
def test_many_segments_between_cores_that_share_a_cache_or_none(comm, monkeypatch, dtype, far):
    monkeypatch.setattr(node.Node, "_far", lambda *_: far)
    monkeypatch.setattr(node, "SLOT_BYTES", 1024)
    monkeypatch.setattr(node, "SMALL_BYTES", 64 * comm.size)
    monkeypatch.setattr(node, "SLICE_VALUES", 1)
    own = comm.Dup()
    for n in (33, 257, 20_011, 3):
        addends = [laws.values(rank, n, dtype) for rank in range(comm.size)]
        for _ in range(3):
            x = addends[comm.rank].clone()
            allreduce(x, laws.limited(own), algorithm="node_window")
            assert torch.equal(x, rank_order_sum(addends)), n
    own.Free()


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_values_that_are_no_numbers_reach_every_rank(comm, dtype, bad):
    for n in (1257, 50_000):
        x = laws.values(comm.rank, n, dtype)
        if comm.rank == comm.size - 1:
            x[[0, 700, n - 1]] = bad
        allreduce(x, laws.limited(comm), algorithm="node_window")
        assert (~torch.isfinite(x)).nonzero().flatten().tolist() == [0, 700, n - 1]
        assert laws.same_everywhere(x, comm)


@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_a_sum_of_one_is_the_value_and_sums_round_as_torch_does(dtype):
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype) if dtype.itemsize == 2 else bits.to(torch.int32).mul(65_521).view(dtype)  # of all exponents
    numbers = ~torch.isnan(x)
    single, pair = torch.empty_like(x), torch.empty_like(x)
    run(x, [x], single)
    assert laws.bits(single[numbers]) == laws.bits(x[numbers])
    assert torch.isnan(single[~numbers]).all()
    other = x.flip(0)
    run(x, [x, other], pair)
    want = (x.float() + other.float()).to(dtype)
    assert torch.equal(pair.nan_to_num(7), want.nan_to_num(7))


def test_bytes_are_handed_over_whole_from_any_place_to_any_other():
    rng = np.random.default_rng(3)
    for start, size_bytes in itertools.product((0, 1, 4, 63), (0, 1, 63, 64, 65, 127, 128, 4099)):
        source, target = rng.integers(0, 256, (2, 5000), dtype=np.uint8)
        want = target.copy()
        want[start : start + size_bytes] = source[7 : 7 + size_bytes]
        hand(target.ctypes.data + start, source.ctypes.data + 7, size_bytes, True)
        assert np.array_equal(target, want), (start, size_bytes)


@pytest.mark.parallel([2, 3, 5])
def test_asking_how_far_the_cores_are_ends_though_a_rank_is_late_and_leaves_the_counters_in_step(comm):
    ours = node_of(group_of(laws.limited(comm)))
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.05)
        assert ours._hop_s() >= 0
        assert comm.allreduce(ours.hops, MPI.MAX) == ours.hops
    x = torch.ones(100_000)
    allreduce(x, comm, algorithm="node_window")
    assert torch.all(x == comm.size)


def run(x: torch.Tensor, rows: list[torch.Tensor], target: torch.Tensor) -> None:
    sources, targets = (np.array([t.data_ptr() for t in ts], dtype=np.uint64) for ts in (rows, [target]))
    sum_rows(KINDS[x.dtype], sources, targets, 0, x.numel())


@pytest.mark.parallel([2, 3])
def test_ranks_that_disagree_are_told_and_can_go_on(comm):
    last = comm.size - 1
    for n, longer in ((10, 11), (50_000, 50_001)):
        x = torch.ones(longer if comm.rank == last else n)
        with pytest.raises(ValueError, match=rf"rank 0 in the sum of {n} values .* rank {last} in .* {longer} values"):
            allreduce(x, laws.limited(comm), algorithm="node_window")
    x = torch.ones(10, dtype=torch.bfloat16 if comm.rank == last else torch.float16)
    with pytest.raises(ValueError, match=r"torch\.float16, but .* torch\.bfloat16"):
        allreduce(x, comm, algorithm="node_window")
    x = torch.ones(50_000)
    assert allreduce(x, comm, algorithm="node_window").eq(comm.size).all()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("n", [10, 100_000])
def test_a_rank_that_does_not_come_is_named(comm, n):
    own = comm.Dup()
    allreduce(torch.ones(n), laws.limited(own), algorithm="node_window")
    if comm.rank == comm.size - 1:
        comm.Barrier()
        return
    group_of(own).wire.waits = Waits(limit_s=0.2)
    with pytest.raises(StallError, match=rf"waited 0\.2 s for rank {comm.size - 1} to come to the sum of an array"):
        allreduce(torch.ones(n), own, algorithm="node_window")
    comm.Barrier()


@pytest.mark.parallel([2])
def test_messages_move_while_a_rank_waits_in_a_sum(comm):
    message, x = np.ones(1 << 20), torch.ones(1000)  # too long to be on its way before its receiver looks for it
    allreduce(x, laws.limited(comm), algorithm="node_window")
    if comm.rank == 0:
        request = comm.Irecv(message, 1)
        allreduce(x, comm, algorithm="node_window")
        request.Wait()
    else:
        laws.limited(comm)
        group_of(comm).wire.waits.all([comm.Isend(message, 0)], lambda: "rank 0 to receive")
        allreduce(x, comm, algorithm="node_window")
    assert x.eq(4).all()


@pytest.mark.parallel([2, 4])
def test_what_cannot_be_summed_is_refused(comm):
    with pytest.raises(ValueError, match=r"codec bf16 could encode; use raw, or two_step"):
        allreduce(torch.zeros(4), comm, "bf16", "node_window")
    group = make_group(comm, MPI.COMM_SELF)
    with pytest.raises(ValueError, match=rf"these ranks are on {comm.size}; use two_level"):
        node_window_allreduce(torch.zeros(4), group, find_codec("raw"))
    group.free()


@pytest.mark.parallel([2, 3])
def test_a_shared_array_is_shared_for_other_communicators_of_these_ranks_only(comm):
    x = shared_zeros(100_000, laws.limited(comm))
    same, reverse = comm.Dup(), comm.Split(0, -comm.rank)
    for other, resident in ((same, True), (reverse, False)):
        ours = node_of(group_of(laws.limited(other)))
        x.fill_(comm.rank + 1)
        assert (ours.enter(x, node.SUM)[0] is not None) is resident
        allreduce(x, other, algorithm="node_window")
        assert x.eq(comm.size * (comm.size + 1) // 2).all()
        other.Free()
    free_shared(x, comm)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 100_000])
def test_slices_cover_everything_once(n, ranks):
    for owners in range(1, ranks + 1):
        cuts = slices(n, owners, ranks).tolist()
        assert cuts[0] == 0
        assert cuts == sorted(cuts)
        assert cuts[owners:] == [n] * (ranks + 1 - owners)
        assert max(np.diff(cuts)) <= -(-n // owners) + node.SLICE_VALUES
