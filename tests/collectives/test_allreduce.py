"""Every algorithm x codec x dtype: near the float64 sum, the same bits on all ranks, the same bits again."""

from __future__ import annotations

import contextlib

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import allreduce, doubling, group_of, ring, strips
from hpcllm.collectives.operations import ALGORITHMS
from hpcllm.errors import CollectiveError, StallError
from hpcllm.mpi.wait import Waits

APART = ("node_window", "two_level", "native")  # which have tests of their own: shared memory, nodes, the library
OURS = [name for name in ALGORITHMS["allreduce"] if name not in APART]
BOUNDS = {"two_step": laws.two_step_bound, "grid": laws.grid_bound, "native": laws.hop_bound}
CASES = [(name, codec, dtype) for name in OURS for codec, dtype in laws.PAIRS]
CASES.append(("native", "raw", torch.float32))


def cut_short(monkeypatch):
    """Segments so short that a test's arrays have several."""
    monkeypatch.setattr(ring, "LANE_BYTES", 1 << 14)
    monkeypatch.setattr(strips, "SEGMENT_VALUES", 500)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    monkeypatch.setattr(doubling, "DOUBLING_VALUES", 1 << 13)
    monkeypatch.setattr(doubling, "HALVING_VALUES", 1 << 13)


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_sum(comm, monkeypatch, algorithm, codec, dtype):
    bound = BOUNDS.get(algorithm, laws.hop_bound)
    found = laws.codec_for(codec, dtype)
    for n in laws.lengths(comm.size):
        addends = [laws.values(rank, n, dtype) for rank in range(comm.size)]
        x, again = addends[comm.rank].clone(), addends[comm.rank].clone()
        assert allreduce(x, laws.limited(comm), codec, algorithm) is x
        wide = [laws.wide(addend) for addend in addends]
        off = np.abs(laws.wide(x) - sum(wide))
        assert np.all(off <= bound(wide, found, dtype)), (n, off.max())
        assert laws.same_everywhere(x, comm), n
        if algorithm == "ring":  # where a chunk is cut does not change what a codec sees
            cut_short(monkeypatch)
        allreduce(again, comm, codec, algorithm)
        monkeypatch.undo()
        assert laws.bits(x) == laws.bits(again), n


@pytest.mark.parallel([3])
@pytest.mark.parametrize("codec", laws.CODECS)
@pytest.mark.parametrize("algorithm", OURS)
def test_many_short_segments(comm, monkeypatch, algorithm, codec):
    cut_short(monkeypatch)
    addends = [laws.values(rank, 30011, torch.float32) for rank in range(comm.size)]
    x = addends[comm.rank].clone()
    allreduce(x, laws.limited(comm), codec, algorithm)
    wide = [laws.wide(addend) for addend in addends]
    bound = BOUNDS.get(algorithm, laws.hop_bound)
    assert np.all(np.abs(laws.wide(x) - sum(wide)) <= bound(wide, laws.codec_for(codec, torch.float32), x.dtype))
    assert laws.same_everywhere(x, comm)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("algorithm", [*OURS, "native"])
def test_a_result_elsewhere_leaves_x_alone(comm, algorithm):
    x, out = laws.values(comm.rank, 300, torch.float32).view(3, 100), torch.empty(3, 100)
    before, want = x.clone(), allreduce(x.clone(), laws.limited(comm), algorithm=algorithm)
    assert allreduce(x, comm, algorithm=algorithm, out=out) is out
    assert torch.equal(x, before)
    assert torch.equal(out, want)


@pytest.mark.parallel([2, 3, 5])
@pytest.mark.parametrize("codec", laws.CODECS)
@pytest.mark.parametrize("algorithm", OURS)
def test_values_that_are_no_numbers_reach_every_rank(comm, algorithm, codec):
    x = laws.values(comm.rank, 1257, torch.float32)
    if comm.rank == comm.size - 1:
        x[[0, 700, 1256]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    allreduce(x, laws.limited(comm), codec, algorithm)
    assert not torch.isfinite(x[[0, 700, 1256]]).any()
    assert laws.same_everywhere(torch.isfinite(x), comm)
    if laws.codec_for(codec, x.dtype).block == 1:
        assert int(torch.isfinite(x).sum()) == 1254


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("algorithm", OURS)
def test_two_numbers_that_are_none_have_the_same_bits_everywhere(comm, algorithm):
    x = torch.full((65,), float("inf") if comm.rank % 2 else -float("inf"))
    x.view(torch.int32)[::3] = 0x7FC00001 + comm.rank  # what tells one NaN from another
    allreduce(x, laws.limited(comm), "raw", algorithm)
    assert torch.isnan(x).all()
    assert laws.same_everywhere(x, comm)


@pytest.mark.parallel([3])
def test_a_sum_of_many_ranks_in_two_steps_is_that_in_rank_order(comm):
    addends = [laws.values(rank, 1000, torch.float32) for rank in range(comm.size)]
    want = addends[0] + addends[1] + addends[2]
    assert torch.equal(allreduce(addends[comm.rank].clone(), laws.limited(comm), "raw", "two_step"), want)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("algorithm", OURS)
def test_a_rank_that_does_not_come_is_named_and_the_communicator_is_closed(comm, algorithm):
    broken = comm.Dup()  # not freed: the rank that is late sends what nobody receives, and a number may be used again
    group = group_of(broken)
    absent = comm.size - 1
    if comm.rank != absent:
        group.wire.waits = Waits(limit_s=0.2)
        with pytest.raises(StallError, match=r"waited 0\.2 s for .* over \d ranks.* rank \d"):
            allreduce(torch.ones(100_000), broken, algorithm=algorithm)
        with pytest.raises(CollectiveError, match=r"earlier collective .* failed.*comm\.Dup"):
            allreduce(torch.ones(10), broken)
    comm.Barrier()
    if comm.rank == absent:  # takes part at last, so that nobody still waits for it when the memory is given back
        group.wire.waits = Waits(limit_s=0.2)
        with contextlib.suppress(StallError):  # the others' messages may be enough
            allreduce(torch.ones(100_000), broken, algorithm=algorithm)


@pytest.mark.parallel([2])
def test_bytes_sent_are_counted(comm):
    group = group_of(laws.limited(comm))
    for codec, ratio in (("raw", 1), ("bf16", 2)):
        before = group.wire.plain_bytes, group.wire.sent_bytes
        allreduce(torch.zeros(1000), comm, codec, "two_step")
        assert group.wire.plain_bytes - before[0] == 4000
        assert group.wire.sent_bytes - before[1] == 4000 / ratio


def test_all_algorithms_are_tested_here_or_beside():
    assert {*OURS, "native", "node_window", "two_level"} >= set(ALGORITHMS["allreduce"]) >= {*OURS, "native"}
