r"""Replicas hold the same parameters, bit for bit; this finds out when they no longer do.

                tp 0             tp 1
    dp 0    [ a0 | norm ]    [ a1 | norm ]      over dp: everything, unless it is sharded there
    dp 1    [ a0 | norm ]    [ a1 | norm ]      over tp: what it does not split

    tensors --crc32 each--> n words --64-bit hash--> largest and smallest over an axis --equal?--> go on
                                                                                       \-- no --> who differs, and where

Sums are made to give the same bits everywhere, so a difference means broken memory, a broken link or a defect, and
every later step would hide it further.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm import buffers
from hpcllm.errors import ReplicaError
from hpcllm.mesh import Mesh
from hpcllm.model.shards import split_dim
from hpcllm.waiting import Waits


def check_replicas(
    parameters: Mapping[str, torch.Tensor], mesh: Mesh, waits: Waits, step: int, sharded: bool = False
) -> None:
    """Compare what ranks should hold alike. Collective over dp and tp. Raises ReplicaError on all that were compared.

    parameters: name -> what this rank keeps of it, contiguous: all of it, or with `sharded` the range that it owns
    among the replicas, which is the same range on each rank of tp that has the parameter whole.
    """
    if not sharded:
        _compare(parameters, mesh.dp, "replicas", waits, step)
    repeated = {name: tensor for name, tensor in parameters.items() if split_dim(name) is None}
    _compare(repeated, mesh.tp, "ranks of tp", waits, step)


def _compare(tensors: Mapping[str, torch.Tensor], axis: MPI.Intracomm, who: str, waits: Waits, step: int) -> None:
    if axis.size == 1:
        return
    sums = np.array([zlib.crc32(buffers.as_bytes(t).numpy().data) for t in tensors.values()], dtype=np.uint32)
    digest = np.frombuffer(hashlib.blake2b(sums.tobytes(), digest_size=8).digest(), dtype=np.uint64)
    extremes = np.concatenate([digest, ~digest])  # the largest ~hash is that of the smallest hash
    waits.allreduce(axis, extremes, lambda: f"{axis.size} {who} to compare their parameters", MPI.MAX)
    if extremes[0] != ~extremes[1]:
        raise _difference(list(tensors), sums, axis, who, step)


def _difference(names: list[str], sums: NDArray[np.uint32], axis: MPI.Intracomm, who: str, step: int) -> ReplicaError:
    """Which tensors differ, on which ranks. Collective over the axis; only on the way out."""
    table = np.empty((axis.size, len(sums)), dtype=np.uint32)
    axis.Allgather(sums, table)
    differs = (table != table[0]).any(axis=0)
    first = int(differs.argmax())
    ranks = axis.group.Translate_ranks(list(range(axis.size)), MPI.COMM_WORLD.group)
    odd = [ranks[place] for place in range(axis.size) if table[place, first] != table[0, first]]
    return ReplicaError(
        f"step {step}: {who} no longer hold the same parameters; {int(differs.sum())} of {len(names)} differ, first "
        f"{names[first]}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:5]))} against rank {ranks[0]}. "
        "Go on from an earlier checkpoint; if it comes back on the same node, its memory or its link is at fault"
    )
