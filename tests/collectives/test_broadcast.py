"""The root's values on every rank, from any root: exact without a codec, within its bound with one, bits equal."""

from __future__ import annotations

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import broadcast, broadcasts
from hpcllm.collectives.operations import ALGORITHMS

CASES = [(name, codec, dtype) for name in ("binomial", "ring") for codec, dtype in laws.PAIRS]
CASES += [("native", "raw", dtype) for dtype in laws.DTYPES]


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_values(comm, monkeypatch, algorithm, codec, dtype):
    found = laws.codec_for(codec, dtype)
    for place, n in enumerate(laws.lengths(comm.size)):
        root = place % comm.size
        want = laws.values(root, n, dtype)
        x, again = laws.values(comm.rank, n, dtype), laws.values(comm.rank, n, dtype)
        assert broadcast(x, laws.limited(comm), root, codec, algorithm) is x
        limit = laws.codec_bound(found, laws.wide(want)) + laws.wide(want.abs()) * laws.ROUNDOFF[dtype] + 6e-8
        limit = np.zeros(n) if found.lossless or comm.size == 1 else limit
        assert np.all(np.abs(laws.wide(x) - laws.wide(want)) <= limit), n
        assert laws.same_everywhere(x, comm), n
        monkeypatch.setattr(broadcasts, "TREE_VALUES", 1 << 12)
        monkeypatch.setattr(broadcasts, "CHAIN_VALUES", 1 << 12)
        broadcast(again, comm, root, codec, algorithm)
        monkeypatch.undo()
        assert laws.bits(x) == laws.bits(again), n


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_values_of_any_kind(comm, algorithm, dtype):
    for root in range(comm.size):
        x = torch.full((3, 5), comm.rank + 1).to(dtype)
        assert torch.equal(
            broadcast(x, laws.limited(comm), root, algorithm=algorithm), torch.full((3, 5), root + 1).to(dtype)
        )


@pytest.mark.parallel([2])
def test_a_root_that_does_not_exist_is_refused(comm):
    for root in (-1, 2):
        with pytest.raises(ValueError, match=rf"root {root} is none of 2 ranks; valid: 0 to 1"):
            broadcast(torch.zeros(3), comm, root)


def test_all_algorithms_are_tested_here():
    assert {case[0] for case in CASES} == set(ALGORITHMS["broadcast"])
