"""Every part on every rank: exact without a codec, within its bound with one, the same bits everywhere."""

from __future__ import annotations

import laws
import numpy as np
import pytest
import torch

from hpcllm.collectives import allgather, bruck, chunk_range, ring
from hpcllm.collectives.operations import ALGORITHMS
from hpcllm.collectives.wire import Packed, Wire

CASES = [(name, codec, dtype) for name in ("ring", "bruck") for codec, dtype in laws.PAIRS]
CASES += [(name, "raw", dtype) for name in ("native", "node_window") for dtype in laws.DTYPES]


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec", "dtype"), CASES, ids=str)
def test_parts_of_one_array(comm, monkeypatch, algorithm, codec, dtype):
    found = laws.codec_for(codec, dtype)
    for n in laws.lengths(comm.size):
        whole = laws.values(0, n, dtype)
        own = slice(*chunk_range(n, comm.size, comm.rank))
        out, in_place = torch.full_like(whole, 7), torch.full_like(whole, 7)
        in_place[own] = whole[own]
        assert allgather(whole[own].clone(), laws.limited(comm), codec, algorithm, out=out) is out
        monkeypatch.setattr(ring, "LANE_BYTES", 1 << 14)
        monkeypatch.setattr(bruck, "ROUND_VALUES", 1 << 13)
        allgather(in_place[own], comm, codec, algorithm, out=in_place)
        monkeypatch.undo()
        limit = laws.codec_bound(found, laws.wide(whole)) + laws.wide(whole.abs()) * laws.ROUNDOFF[dtype]
        limit = np.zeros(n) if found.lossless or comm.size == 1 else limit + 6e-8
        assert np.all(np.abs(laws.wide(out) - laws.wide(whole)) <= limit), n
        assert laws.same_everywhere(out, comm), n
        assert laws.bits(out) == laws.bits(in_place), n


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS["allgather"])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.complex64, torch.complex128]
)
def test_values_of_any_kind_and_shape(comm, algorithm, dtype):
    part = (torch.arange(30).view(5, 2, 3) % 7 * (comm.rank + 1)).to(dtype)
    result = allgather(part, laws.limited(comm), algorithm=algorithm)
    want = torch.cat([(torch.arange(30).view(5, 2, 3) % 7 * (rank + 1)).to(dtype) for rank in range(comm.size)])
    assert torch.equal(result, want)


def test_pieces_of_any_length_start_at_cache_lines():
    codec, lengths = laws.codec_for("bf16", torch.float32), [5, 0, 33, 1]
    packed = Packed(Wire(), codec, lengths)
    for n in lengths:
        packed.add(torch.ones(n), 0)
    for place, n in enumerate(lengths):
        assert packed.piece(place).data_ptr() % 64 == 0
        assert packed.piece(place).tolist() == codec.encode(torch.ones(n), torch.empty(100, dtype=torch.uint8)).tolist()


@pytest.mark.parallel([2])
def test_parts_are_checked(comm):
    with pytest.raises(ValueError, match=rf"rank {comm.rank} of 2 owns 5, but part has 4"):
        allgather(torch.zeros(4), comm, out=torch.zeros(10))
    out = torch.zeros(10)
    with pytest.raises(ValueError, match="overlaps"):
        allgather(out[2:7], comm, out=out)
    with pytest.raises(ValueError, match="native sends raw"):
        allgather(torch.zeros(4), comm, "bf16", "native")


def test_all_algorithms_are_tested_here():
    assert {case[0] for case in CASES} == set(ALGORITHMS["allgather"])
