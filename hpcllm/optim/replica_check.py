r"""Replicas hold the same parameters and optimizer states, bit for bit; this finds out when they no longer do.

                tp 0             tp 1
    dp 0    [ a0 | norm ]    [ a1 | norm ]      over dp: everything, unless it is sharded there
    dp 1    [ a0 | norm ]    [ a1 | norm ]      over tp: what it does not split

    tensors --a sum each--> n words --64-bit hash--> largest and smallest over an axis --equal?--> go on
                                                                                       \-- no --> who differs, and where

Sums are made to give the same bits everywhere, so a difference means broken memory, a broken link or a defect, and
every later step would hide it further. A checkpoint would hide it for good: each replica writes a part of it, and the
mixture is what all of them read. So they are compared before each save. What one rank alone holds (states that are
sharded over dp, all at dp=1) is compared with nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import xxhash
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import ReplicaError
from hpcllm.model.shapes import split_dim
from hpcllm.mpi import buffers
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.rank_names import name_ranks
from hpcllm.mpi.wait import Waits
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece

WORDS = {2: torch.int16, 4: torch.int32}  # by the bytes of a value
MIX = -0x61C8864680B583EB  # 2^64 over the golden ratio, modulo 2^64, as a signed number
CHUNK = 1 << 22  # words: 32 MiB of products at a time
MOST_NAMED = 5  # runs of ranks in a message


WHAT = {MODEL: "parameters", MASTER: "master weights", EXP_AVG: "first moments", EXP_AVG_SQ: "second moments"}


def check_state(
    parameters: Mapping[str, torch.Tensor], pieces: Iterable[Piece], mesh: Mesh, waits: Waits, step: int, shard: str
) -> None:
    """Compare all that a checkpoint takes from several ranks. Collective over dp and tp.

    parameters: whole, but with shard "all". pieces: parameters and states that this rank owns; with shard "none" each
    replica owns all. Raises ReplicaError on all ranks that were compared.
    """
    if shard != "all":
        check_replicas(parameters, mesh, waits, step)
    held: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in WHAT if kind != MODEL or shard == "all"}
    for piece in pieces:
        if piece.kind in held:
            held[piece.kind][piece.name] = piece.values
    for kind, values in held.items():
        check_replicas(values, mesh, waits, step, shard != "none", WHAT[kind])


def check_replicas(
    tensors: Mapping[str, torch.Tensor],
    mesh: Mesh,
    waits: Waits,
    step: int,
    sharded: bool = False,
    what: str = WHAT[MODEL],
) -> None:
    """Compare what ranks should hold alike. Collective over dp and tp. Raises ReplicaError on all that were compared.

    tensors: by the name of the parameter, what this rank keeps of it or of its state, contiguous: all of it, or with
    `sharded` the range that it owns among the replicas, which is the same range on each rank of tp that has the
    parameter whole. what: they are, in words.
    """
    if not sharded:
        _compare(tensors, mesh.dp, "replicas", what, waits, step)
    repeated = {name: tensor for name, tensor in tensors.items() if split_dim(name) is None}
    _compare(repeated, mesh.tp, "ranks of tp", what, waits, step)


def _compare(
    tensors: Mapping[str, torch.Tensor], axis: MPI.Intracomm, who: str, what: str, waits: Waits, step: int
) -> None:
    if axis.size == 1:
        return
    sums = checksums(list(tensors.values()))
    digest = np.frombuffer(hashlib.blake2b(sums.tobytes(), digest_size=8).digest(), dtype=np.uint64)
    extremes = np.concatenate([digest, ~digest])  # the largest ~hash is that of the smallest hash
    waits.allreduce(axis, extremes, lambda: f"{axis.size} {who} to compare their {what}", MPI.MAX)
    if extremes[0] != ~extremes[1]:
        raise _difference(list(tensors), sums, axis, who, what, step)


def checksums(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """(tensors,) One number each, of the bits of a contiguous tensor: XXH3 on the CPU, weighted sums on a device."""
    if not any(tensor.is_cpu for tensor in tensors):
        return _device_checksums(tensors)
    digests = [xxhash.xxh3_64_intdigest(buffers.as_bytes(tensor).numpy().data) for tensor in tensors]
    return np.array(digests, dtype=np.uint64)


def _device_checksums(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """Sum over i of word i times weight i, modulo 2^64, of each CHUNK of words; then the same of a tensor's sums.

    A weight is odd, so no change of a single word goes unseen. The host waits once, for all tensors together.
    """
    if not tensors:
        return np.empty(0, dtype=np.uint64)
    most = max(tensor.numel() for tensor in tensors)
    weights = _weights(0, min(CHUNK, most), tensors[0].device)
    of_sums = _weights(CHUNK, -(-most // CHUNK), tensors[0].device)
    sums = []
    for tensor in tensors:
        words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
        parts = torch.stack([(chunk * weights[: chunk.numel()]).sum() for chunk in torch.split(words, CHUNK)])
        sums.append((parts * of_sums[: parts.numel()]).sum())
    return torch.stack(sums).cpu().numpy().view(np.uint64)


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """(count,) int64, odd, those of places first, first + 1, ...: no two that are alike, or multiples of each other."""
    bits = torch.arange(first + 1, first + count + 1, device=device).mul_(MIX)
    return bits.bitwise_xor_(bits >> 29).mul_(MIX).bitwise_or_(1)


def _difference(
    names: list[str], sums: NDArray[np.uint64], axis: MPI.Intracomm, who: str, what: str, step: int
) -> ReplicaError:
    """Describe the tensors that differ, and on which ranks. Collective over the axis; only on the way out."""
    table = np.empty((axis.size, len(sums)), dtype=np.uint64)
    axis.Allgather(sums, table)
    differs = (table != table[0]).any(axis=0)
    first = int(differs.argmax())
    ranks = axis.group.Translate_ranks(list(range(axis.size)), MPI.COMM_WORLD.group)
    return ReplicaError(
        f"step {step}: {who} no longer hold the same {what}; {int(differs.sum())} of {len(names)} differ, first "
        f"{names[first]}: {_sides(table[:, first].tolist(), ranks)}. Go on from an earlier checkpoint; if it comes "
        "back on the same node, its memory or its link is at fault"
    )


def _sides(sums: Sequence[int], ranks: Sequence[int]) -> str:
    """'rank 3 against 7 others that agree'; without a majority nobody can tell who is right."""
    ((usual, count), *_) = Counter(sums).most_common()
    if 2 * count > len(sums):
        odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != usual]
        return f"{name_ranks(odd, MOST_NAMED)} against {count} others that agree"
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != sums[0]]
    return f"{name_ranks(odd, MOST_NAMED)} against rank {ranks[0]}, and no majority tells who is right"
