"""Replicas that differ in a single bit are found, on every rank at once, and named."""

from __future__ import annotations

import pytest
import torch

from hpcllm.errors import ReplicaError
from hpcllm.replicas import check_replicas
from hpcllm.waiting import Waits


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (17, 5), "norm.weight": (5,), "head.weight": (3, 5), "empty": (0,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parallel([1, 2, 3, 4])
def test_equal_replicas_pass(comm):
    check_replicas(parameters(), comm, Waits(30.0), 1)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", ["embedding.weight", "head.weight", "scalar"])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_on_one_rank_is_found_by_all(comm, name, bit):
    for odd in range(comm.size):
        mine = parameters()
        if comm.rank == odd:
            mine[name].view(-1).view(torch.int32)[-1] ^= -(2**31) if bit == 31 else 1
        with pytest.raises(ReplicaError, match=f"step 7: .* 1 of 5 differ, first {name}: rank") as caught:
            check_replicas(mine, comm, Waits(30.0), 7)
        others = ", ".join(str(rank) for rank in range(1, comm.size)) if odd == 0 else str(odd)
        assert f" {others} against rank 0" in str(caught.value)
