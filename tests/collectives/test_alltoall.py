"""Block r of rank s ends as block s of rank r: exact without a codec, within its bound with one."""

from __future__ import annotations

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import alltoall, bruck, pairwise
from hpcllm.collectives.operations import ALGORITHMS

CASES = [(name, codec, dtype) for name in ("pairwise", "bruck") for codec, dtype in laws.PAIRS]
CASES += [("native", "raw", dtype) for dtype in laws.DTYPES]


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_blocks(comm, monkeypatch, algorithm, codec, dtype):
    found = laws.codec_for(codec, dtype)
    for block in (0, 1, 31, 1000, 9001):
        sent = [laws.values(rank, block * comm.size, dtype) for rank in range(comm.size)]
        x = sent[comm.rank].clone()
        result = alltoall(x, laws.limited(comm), codec, algorithm)
        want = torch.cat([one[block * comm.rank : block * (comm.rank + 1)] for one in sent])
        limit = laws.codec_bound(found, laws.wide(want)) + laws.wide(want.abs()) * laws.ROUNDOFF[dtype] + 6e-8
        limit = np.zeros(want.numel()) if found.lossless else limit
        assert np.all(np.abs(laws.wide(result) - laws.wide(want)) <= limit), block
        own = slice(block * comm.rank, block * (comm.rank + 1))
        assert laws.bits(result[own]) == laws.bits(x[own])
        assert laws.bits(x) == laws.bits(sent[comm.rank])
        monkeypatch.setattr(pairwise, "SEGMENT_VALUES", 1 << 12)
        monkeypatch.setattr(bruck, "ROUND_VALUES", 1 << 14)
        assert laws.bits(alltoall(x, comm, codec, algorithm, out=torch.zeros_like(x))) == laws.bits(result), block
        monkeypatch.undo()


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS["alltoall"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128])
def test_values_of_any_kind_keep_their_shape(comm, algorithm, dtype):
    x = ((torch.arange(comm.size)[:, None, None] + comm.rank * comm.size) * torch.ones(5, 3)).to(dtype)
    result = alltoall(x, laws.limited(comm), algorithm=algorithm)
    want = (torch.arange(comm.size)[:, None, None] * comm.size + comm.rank) * torch.ones(5, 3)
    assert torch.equal(result, want.to(dtype))


@pytest.mark.parallel([2])
def test_what_has_no_equal_blocks_is_refused(comm):
    with pytest.raises(ValueError, match="7 values do not make 2 blocks"):
        alltoall(torch.zeros(7), comm)
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="shares memory"):
        alltoall(x, comm, out=x)


def test_all_algorithms_are_tested_here():
    assert {case[0] for case in CASES} == set(ALGORITHMS["alltoall"])
