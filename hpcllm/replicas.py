"""Replicas hold the same parameters, bit for bit; this finds out when they no longer do.

    parameters --crc32 each--> n words --64-bit hash--> largest and smallest over dp --equal?--> go on
                                                                                  \\-- no --> who differs, and where

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

from hpcllm.errors import ReplicaError
from hpcllm.waiting import Waits


def check_replicas(parameters: Mapping[str, torch.Tensor], dp: MPI.Intracomm, waits: Waits, step: int) -> None:
    """Compare the parameters of all ranks of dp. Collective over dp. Raises ReplicaError on all of them."""
    sums = np.array([zlib.crc32(p.detach().numpy().data) for p in parameters.values()], dtype=np.uint32)
    digest = np.frombuffer(hashlib.blake2b(sums.tobytes(), digest_size=8).digest(), dtype=np.uint64)
    extremes = np.concatenate([digest, ~digest])  # the largest ~hash is that of the smallest hash
    waits.allreduce(dp, extremes, lambda: f"{dp.size} replicas to compare their parameters", MPI.MAX)
    if extremes[0] != ~extremes[1]:
        raise _difference(list(parameters), sums, dp, step)


def _difference(names: list[str], sums: NDArray[np.uint32], dp: MPI.Intracomm, step: int) -> ReplicaError:
    """Which parameters differ, on which ranks. Collective over dp; only on the way out."""
    table = np.empty((dp.size, len(sums)), dtype=np.uint32)
    dp.Allgather(sums, table)
    differs = (table != table[0]).any(axis=0)
    first = int(differs.argmax())
    ranks = dp.group.Translate_ranks(list(range(dp.size)), MPI.COMM_WORLD.group)
    odd = [ranks[replica] for replica in range(dp.size) if table[replica, first] != table[0, first]]
    return ReplicaError(
        f"step {step}: replicas no longer hold the same parameters; {int(differs.sum())} of {len(names)} differ, first "
        f"{names[first]}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd[:5]))} against rank {ranks[0]}. "
        "Go on from an earlier checkpoint; if it comes back on the same node, its memory or its link is at fault"
    )
