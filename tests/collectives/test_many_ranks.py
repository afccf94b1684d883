"""Sums over thousands of ranks, as one of them: messages and scratch memory of the loops themselves."""

from __future__ import annotations

import laws
import pytest
import torch
from counted import counted_sum
from mpi4py import MPI

from hpcllm.collectives import allreduce, group_of, strips
from hpcllm.collectives.grid import grid_allreduce
from hpcllm.collectives.group import make_group
from hpcllm.collectives.strips import Grid, grid_strip_values, takes_grid
from hpcllm.collectives.two_level import two_level_allreduce
from hpcllm.collectives.two_step import two_step_allreduce

MIB = 1 << 20
INT8_BLOCK = 256
LARGEST_SCRATCH_MIB = 80  # of int8, whatever the ranks


@pytest.mark.parametrize("ranks", [16, 97, 1024, 8192])
def test_a_grid_sends_four_roots_of_the_ranks_a_strip(ranks):
    n, grid = 6_553_600, Grid(ranks)
    count = -(-n // grid_strip_values(n, ranks, INT8_BLOCK))
    for rank in {0, ranks // 2, ranks - 1}:
        comm, _, _ = counted_sum(grid_allreduce, ranks, rank, n, "int8:256")
        assert 0 < len(comm.sent) <= count * grid.messages()
        assert len({peer for peer, _ in comm.sent}) <= grid.messages() // 2


@pytest.mark.parametrize(
    ("function", "ranks"), [(grid_allreduce, 1024), (grid_allreduce, 8192), (two_step_allreduce, 1024)]
)
def test_scratch_memory_has_a_bound_whatever_the_ranks_and_the_length(function, ranks):
    sizes = [counted_sum(function, ranks, ranks // 3, n, "int8:256")[1] for n in (25 * MIB // 4, 100 * MIB // 4)]
    assert max(sizes) <= LARGEST_SCRATCH_MIB * MIB


def test_two_level_takes_the_grid_where_nodes_are_many():
    """Ranks that are alone on their nodes; what it sends is what the rule of untuned `auto` says."""
    for ranks in (8, 64):
        wanted = grid_allreduce if takes_grid(ranks) else two_step_allreduce
        assert wanted is (two_step_allreduce if ranks == 8 else grid_allreduce)
        found, want = (counted_sum(function, ranks, 3, 1 << 20, "int8:256")[0] for function in (_alone, wanted))
        assert found.sent == want.sent


def _alone(x, group, codec):
    group.node_sizes = (1,) * group.size
    two_level_allreduce(x, group, codec)


def test_a_short_array_has_few_owners_and_few_messages():
    """4 KiB of int8 at least to each: a rank of 1024 that owns nothing tells 4 owners, not 31 of its row."""
    n = 4 * strips.LEAST_VALUES
    sent = [len(counted_sum(grid_allreduce, 1024, rank, n, "int8:256")[0].sent) for rank in range(0, 1024, 93)]
    assert min(sent) == 4
    assert max(sent) <= Grid(1024).messages()


@pytest.mark.parallel([4, 5])
@pytest.mark.parametrize("codec", ["raw", "int8:256", "exp"])
def test_what_is_counted_is_what_real_ranks_send(comm, codec):
    n, group = 300_000, group_of(laws.limited(comm))
    for name, function in (("grid", grid_allreduce), ("two_step", two_step_allreduce)):
        before = group.wire.plain_bytes
        allreduce(torch.ones(n), comm, codec, name)
        plain = comm.allreduce(group.wire.plain_bytes - before)
        assert plain == 2 * (comm.size - 1) * n * 4
        if codec != "exp":  # which cannot decode the zeros of the counting communicator
            before = group.wire.sent_bytes
            allreduce(torch.ones(n), comm, codec, name)
            counted = counted_sum(function, comm.size, comm.rank, n, codec)[0]
            assert sum(size for _, size in counted.sent) == group.wire.sent_bytes - before


@pytest.mark.parallel([4, 5])
@pytest.mark.parametrize("codec", ["raw", "int8:256"])
def test_two_level_through_a_grid_is_near_the_sum_and_the_same_everywhere(comm, monkeypatch, codec):
    monkeypatch.setattr(strips, "GRID_RANKS", 4)
    group = make_group(comm, MPI.COMM_SELF)
    addends = [laws.values(rank, 20_011, torch.float32) for rank in range(comm.size)]
    x, y = addends[comm.rank].clone(), addends[comm.rank].clone()
    allreduce(x, group, codec, "two_level")
    allreduce(y, laws.limited(comm), codec, "grid")
    assert torch.equal(x, y)
    assert laws.same_everywhere(x, comm)
    group.free()
