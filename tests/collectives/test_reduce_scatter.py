"""Every rank gets its chunk of the sum, within the bound, the same bits again; x stays as it is."""

from __future__ import annotations

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import chunk_range, reduce_scatter, ring, strips, two_step
from hpcllm.collectives.operations import ALGORITHMS

CASES = [(name, codec, dtype) for name in ("ring", "two_step") for codec, dtype in laws.PAIRS]
CASES += [("node_window", "raw", dtype) for dtype in laws.DTYPES]
CASES.append(("native", "raw", torch.float32))


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_sum(comm, monkeypatch, algorithm, codec, dtype):
    bound = laws.two_step_bound if algorithm in ("two_step", "node_window") else laws.hop_bound
    for n in laws.lengths(comm.size):
        addends = [laws.values(rank, n, dtype) for rank in range(comm.size)]
        x, wide = addends[comm.rank].clone(), [laws.wide(addend) for addend in addends]
        own = slice(*chunk_range(n, comm.size, comm.rank))
        result = reduce_scatter(x, laws.limited(comm), codec, algorithm)
        allowed = bound(wide, laws.codec_for(codec, dtype), dtype)[own]
        assert np.all(np.abs(laws.wide(result) - sum(wide)[own]) <= allowed), n
        assert laws.bits(x) == laws.bits(addends[comm.rank])
        monkeypatch.setattr(ring, "LANE_BYTES", 1 << 14)
        monkeypatch.setattr(strips, "SEGMENT_VALUES", 500)
        again = torch.full_like(result, 7)
        assert reduce_scatter(x, comm, codec, algorithm, out=again) is again
        monkeypatch.undo()
        assert laws.bits(result) == laws.bits(again), n


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_the_sum_may_take_the_place_of_the_own_chunk(comm, algorithm, codec, dtype):
    """The bits of a sum apart, and the other chunks stay as they are."""
    for n in laws.lengths(comm.size):
        x = laws.values(comm.rank, n, dtype)
        want, own = x.clone(), slice(*chunk_range(n, comm.size, comm.rank))
        want[own] = reduce_scatter(x, laws.limited(comm), codec, algorithm)
        reduce_scatter(x, comm, codec, algorithm, out=x[own])
        assert laws.bits(x) == laws.bits(want), n


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("codec", ["raw", "int8:256", "exp"])
def test_how_much_is_under_way_changes_no_bit(comm, monkeypatch, codec):
    monkeypatch.setattr(strips, "SEGMENT_VALUES", 512)
    n, found = 40_000 * comm.size + 7, []
    for under_way_bytes in (0, 40_000, 1 << 30):
        monkeypatch.setattr(two_step, "UNDER_WAY_BYTES", under_way_bytes)
        x = laws.values(comm.rank, n, torch.float32)
        found.append(laws.bits(reduce_scatter(x, laws.limited(comm), codec, "two_step")))
    assert found[0] == found[1] == found[2]


@pytest.mark.parallel([3])
def test_the_sum_is_not_encoded(comm):
    """bf16 carries whole numbers up to 256; three times 127 it would round."""
    x = torch.arange(-127.0, 128.0).repeat(3)
    result = reduce_scatter(x, laws.limited(comm), "bf16", "two_step")
    assert torch.equal(result, 3 * x[slice(*chunk_range(765, 3, comm.rank))])


@pytest.mark.parallel([2])
def test_out_is_checked(comm):
    with pytest.raises(ValueError, match=r"out has 4 values of torch\.float32, the result has 5 of torch\.float32"):
        reduce_scatter(torch.zeros(10), comm, out=torch.zeros(4))
    x = torch.zeros(10)
    other = slice(*chunk_range(10, comm.size, 1 - comm.rank))
    with pytest.raises(ValueError, match="shares memory"):
        reduce_scatter(x, comm, out=x[other])


def test_all_algorithms_are_tested_here():
    assert {case[0] for case in CASES} == set(ALGORITHMS["reduce_scatter"])
