"""Nodes of few ranks each: the sum of the nodes' exact sums, within the codec's bound, the same bits everywhere."""

from __future__ import annotations

import laws
import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.collectives import allreduce, group_of, node, shared_zeros, strips
from hpcllm.collectives.group import make_group
from hpcllm.collectives.two_level import peers_of
from hpcllm.errors import StallError
from hpcllm.mpi.wait import Waits

WIDTHS = [2, 3]  # ranks on a node; the last node has what is left
CODECS = [name for name in ("raw", "int8:256", "exp") if name.split(":")[0] in laws.KINDS]


def nodes_of(comm, width: int):
    group = make_group(comm, comm.Split(comm.rank // width))
    group.wire.waits = Waits(laws.LIMIT_S)
    return group


def node_sums(addends: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    totals = []
    for first in range(0, len(addends), width):
        total = addends[first].float()
        for addend in addends[first + 1 : first + width]:
            total = total + addend.float()
        totals.append(total.to(addends[0].dtype))
    return totals


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", laws.DTYPES, ids=str)
def test_sum(comm, width, dtype):
    group = nodes_of(comm, width)
    shared = shared_zeros(20_100, group, dtype)
    for codec in CODECS:
        found = laws.codec_for(codec, dtype)
        for n in laws.lengths(comm.size):
            addends = [laws.values(rank, n, dtype) for rank in range(comm.size)]
            sums = [laws.wide(total) for total in node_sums(addends, width)]
            x, again = addends[comm.rank].clone(), shared[5 : 5 + n].copy_(addends[comm.rank])
            assert allreduce(x, group, codec, "two_level") is x
            bound = laws.two_step_bound(sums, found, dtype) if group.nodes > 1 else 0
            assert np.all(np.abs(laws.wide(x) - sum(sums)) <= bound), (codec, n)
            assert laws.same_everywhere(x, comm), (codec, n)
            allreduce(again, group, codec, "two_level")
            assert laws.bits(x) == laws.bits(again), (codec, n)
    group.free()


@pytest.mark.parallel([3, 4, 5])
def test_many_segments(comm, monkeypatch):
    monkeypatch.setattr(node, "SLOT_BYTES", 1024)
    monkeypatch.setattr(node, "SLICE_VALUES", 1)
    group = nodes_of(comm, 2)
    for n in (33, 20_011):
        addends = [laws.values(rank, n, torch.float32) for rank in range(comm.size)]
        x = addends[comm.rank].clone()
        allreduce(x, group, algorithm="two_level")
        sums = node_sums(addends, 2)
        assert torch.equal(x, sum(sums[1:], start=sums[0]))
    group.free()


@pytest.mark.parallel([3, 4, 5])
@pytest.mark.parametrize("grid_ranks", [2, 100])
def test_a_stream_of_many_strips(comm, monkeypatch, grid_ranks):
    """Node sums, wire and gatherings of different strips at the same time, in the order that arrays' places ask for."""
    for module, name, value in (
        (strips, "STREAM_VALUES", 300),
        (strips, "LEAST_VALUES", 100),
        (node, "SLOT_BYTES", 4096),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(strips, "GRID_RANKS", grid_ranks)
    group, n = nodes_of(comm, 2), 40_011
    shared = shared_zeros(n, group)
    bound = laws.two_step_bound if grid_ranks > group.nodes else laws.grid_bound
    for codec in CODECS:
        addends = [laws.values(rank, n, torch.float32) for rank in range(comm.size)]
        sums = [laws.wide(total) for total in node_sums(addends, 2)]
        x, again = addends[comm.rank].clone(), shared.copy_(addends[comm.rank])
        for _ in range(2):  # what the first call left of counters and slots, the second goes on from
            x.copy_(addends[comm.rank])
            allreduce(x, group, codec, "two_level")
        off = np.abs(laws.wide(x) - sum(sums))
        assert np.all(off <= bound(sums, laws.codec_for(codec, x.dtype), x.dtype)), (codec, off.max())
        assert laws.same_everywhere(x, comm), codec
        allreduce(again, group, codec, "two_level")
        assert torch.equal(x, again), codec
    group.free()


@pytest.mark.parallel([3, 4])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_reach_every_rank(comm, codec, bad):
    group = nodes_of(comm, 2)
    x = laws.values(comm.rank, 5000, torch.float32)
    if comm.rank == 1:
        x[[0, 700, 4999]] = bad
    allreduce(x, group, codec, "two_level")
    assert not torch.isfinite(x[[0, 700, 4999]]).any()
    assert laws.same_everywhere(torch.isfinite(x), comm)
    group.free()


@pytest.mark.parallel([3, 4, 5])
def test_a_node_sends_its_sum_once_whatever_its_ranks(comm):
    group, n = nodes_of(comm, 2), 60_000
    allreduce(torch.ones(n), group, "bf16", "two_level")
    nodes = -(-comm.size // 2)
    plain, sent = (comm.allreduce(count) for count in (group.wire.plain_bytes, group.wire.sent_bytes))
    assert plain == 2 * (nodes - 1) * n * 4
    assert sent == plain / 2
    assert peers_of(group).size == nodes if group.node.rank < group.lanes else group.wire.sent_bytes == 0
    group.free()


@pytest.mark.parallel([4])
def test_a_node_that_does_not_come_is_named(comm):
    group = nodes_of(comm, 2)
    allreduce(torch.ones(10), group, algorithm="two_level")
    if comm.rank < 2:
        group.wire.waits = Waits(limit_s=0.2)
        with pytest.raises(StallError, match=rf"waited 0\.2 s for .*rank {comm.rank + 2}"):
            allreduce(torch.ones(100_000), group, algorithm="two_level")
    comm.Barrier()


@pytest.mark.parallel([2])
def test_nodes_of_one_rank_are_only_two_steps(comm):
    x, y = (laws.values(comm.rank, 5000, torch.float32) for _ in range(2))
    allreduce(x, make_group(comm, MPI.COMM_SELF), "bf16", "two_level")
    allreduce(y, group_of(comm), "bf16", "two_step")
    assert torch.equal(x, y)
