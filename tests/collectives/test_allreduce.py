"""Every algorithm x codec: near the float64 sum, the same bits on all ranks, the same bits again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.codecs import BF16, RAW
from hpcllm.collectives import allreduce, ring, ring_scratch_bytes
from hpcllm.errors import StallError
from hpcllm.waiting import Waits

CASES = [("ring", RAW), ("ring", BF16), ("native", RAW)]
LENGTHS = [0, 1, 2, 3, 5, 127, 1000, 4099]
# unit roundoff of what travels: an upper bound of the error of each addition or encoding, relative to sum |addend|
ROUNDOFF = {"raw": 2.0**-24, "bf16": 2.0**-8}


def addend(rank: int, n: int) -> torch.Tensor:
    scale = np.exp(np.random.default_rng(99).standard_normal(n))  # values of many magnitudes
    return torch.from_numpy((np.random.default_rng([rank, n]).standard_normal(n) * scale).astype("f4"))


def bits_agree(x: torch.Tensor, comm) -> bool:
    copies = comm.allgather(x.numpy().tobytes())
    return all(copy == copies[0] for copy in copies)


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algorithm", "codec"), CASES, ids=lambda case: getattr(case, "name", case))
@pytest.mark.parametrize("lane_bytes", [64, 1 << 20], ids=["many lanes", "one lane"])
def test_sum(comm, monkeypatch, algorithm, codec, lane_bytes):
    monkeypatch.setattr(ring, "LANE_BYTES", lane_bytes)
    for n in LENGTHS:
        x = addend(comm.rank, n)
        again = x.clone()
        allreduce(x, comm, codec, algorithm)
        allreduce(again, comm, codec, algorithm, scratch=torch.empty(ring_scratch_bytes(n, comm.size, codec)).byte())
        addends = [addend(rank, n).numpy().astype("f8") for rank in range(comm.size)]
        bound = ROUNDOFF[codec.name] * 1.01 * (comm.size + 1) * np.abs(addends).sum(axis=0)
        assert np.all(np.abs(x.numpy() - np.sum(addends, axis=0)) <= bound)
        assert bits_agree(x, comm)
        assert torch.equal(x, again)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(("algorithm", "codec"), CASES, ids=lambda case: getattr(case, "name", case))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_reach_every_rank(comm, algorithm, codec, bad):
    x = addend(comm.rank, 257)
    if comm.rank == comm.size - 1:
        x[[0, 100, 256]] = bad
    allreduce(x, comm, codec, algorithm)
    assert (~torch.isfinite(x)).nonzero().flatten().tolist() == [0, 100, 256]


@pytest.mark.parallel([2])
def test_what_cannot_be_summed_is_refused(comm):
    with pytest.raises(ValueError, match="float32"):
        allreduce(torch.zeros(4, dtype=torch.float64), comm)
    with pytest.raises(ValueError, match="contiguous"):
        allreduce(torch.zeros(8)[::2], comm)
    with pytest.raises(ValueError, match="valid: ring, native"):
        allreduce(torch.zeros(4), comm, algorithm="rnig")
    with pytest.raises(ValueError, match="bf16 needs"):
        allreduce(torch.zeros(4), comm, BF16, "native")


@pytest.mark.parallel([2])
def test_a_rank_that_does_not_come_is_named(comm):
    if comm.rank == 0:
        with pytest.raises(StallError, match=r"waited 0\.2 s for hop 0 of a ring sum over 2 ranks, from rank 1"):
            allreduce(torch.ones(10), comm, waits=Waits(limit_s=0.2))
        comm.Barrier()
    else:
        comm.Barrier()
        comm.Recv([bytearray(20), MPI.BYTE], 0, 0)  # what rank 0 had sent, so that the communicator ends empty
