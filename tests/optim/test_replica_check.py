"""Replicas that differ in a single bit are found, on every rank that was compared, and named."""

from __future__ import annotations

import pytest
import torch

from hpcllm.config.schema import MeshConfig
from hpcllm.errors import ReplicaError
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.wait import Waits
from hpcllm.optim.flat_buffers import MODEL, Piece
from hpcllm.optim.replica_check import WHAT, check_replicas, check_state


def parameters(tp_rank: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of one stage; what tp splits is another tensor on each of its ranks."""
    shapes = {"embedding.weight": (17, 5), "norm.weight": (5,), "head.weight": (3, 5), "empty": (0,), "scalar": ()}
    made = {}
    for name, shape in shapes.items():
        split = name in ("embedding.weight", "head.weight")
        generator = torch.Generator().manual_seed(tp_rank if split else 7)
        made[name] = torch.randn(shape, generator=generator).to(dtype)
    return made


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_replicas_pass(comm, dtype):
    for tp in (n for n in range(1, comm.size + 1) if comm.size % n == 0):
        with open_mesh(comm, MeshConfig(tp=tp)) as mesh:
            check_replicas(parameters(mesh.tp.rank, dtype), mesh, Waits(30.0), 1)
            owned = {name: tensor + mesh.dp.rank for name, tensor in parameters(mesh.tp.rank).items()}
            check_replicas(owned, mesh, Waits(30.0), 1, sharded=True)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", ["embedding.weight", "head.weight", "scalar"])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_on_one_rank_is_found_by_all(comm, name, bit):
    with open_mesh(comm, MeshConfig()) as mesh:
        for odd in range(comm.size):
            mine = parameters()
            if comm.rank == odd:
                mine[name].view(-1).view(torch.int32)[-1] ^= -(2**31) if bit == 31 else 1
            with pytest.raises(ReplicaError, match=f"step 7: replicas .* 1 of 5 differ, first {name}: rank") as caught:
                check_replicas(mine, mesh, Waits(30.0), 7)
            if comm.size == 2:
                assert "rank 1 against rank 0, and no majority tells who is right" in str(caught.value)
            else:
                assert f"rank {odd} against {comm.size - 1} others that agree" in str(caught.value)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("kind", WHAT)
@pytest.mark.parametrize("shard", ["none", "states", "all"])
def test_whatever_several_ranks_hold_is_compared(comm, kind, shard):
    """A bit of one rank's parameters or states is found wherever another rank has the same; alone it cannot be."""
    for tp in {1, comm.size}:
        with open_mesh(comm, MeshConfig(tp=tp)) as mesh:
            whole = parameters(mesh.tp.rank)
            pieces = [Piece(k, n, 0, x.numel(), x.clone().view(-1)) for k in WHAT for n, x in whole.items()]
            check_state(whole, pieces, mesh, Waits(30.0), 7, shard)
            if comm.rank == comm.size - 1:
                (piece,) = (piece for piece in pieces if (piece.kind, piece.name) == (kind, "norm.weight"))
                piece.values[3] += 1
            # with weights whole on each replica, the parameters themselves are compared, not the owned range of them
            seen = (shard == "all" and tp > 1) if kind == MODEL else (shard == "none" or tp > 1)
            if seen:
                with pytest.raises(ReplicaError, match=f"the same {WHAT[kind]}; 1 of [0-9]+ differ, first norm.weight"):
                    check_state(whole, pieces, mesh, Waits(30.0), 7, shard)
            else:
                check_state(whole, pieces, mesh, Waits(30.0), 7, shard)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_tp_replicates_is_compared_over_tp(comm, sharded):
    with open_mesh(comm, MeshConfig(tp=comm.size)) as mesh:
        mine = parameters(mesh.tp.rank)
        if comm.rank == comm.size - 1:
            mine["norm.weight"][2] += 1
        with pytest.raises(
            ReplicaError, match=rf"ranks of tp .* 1 of 3 differ, first norm.weight: rank {comm.size - 1} "
        ):
            check_replicas(mine, mesh, Waits(30.0), 7, sharded)
