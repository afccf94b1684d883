"""What error feedback owes, in a checkpoint: the surplus of every rank, one after another.

    /feedback/surplus  [ rank 0: bucket 0 | bucket 1 ][ rank 1: bucket 0 | bucket 1 ] ...     float32
    /feedback@layout   a hash of what those ranges belong to

A surplus is what one rank took from its own addends, so unlike weights it means nothing to another layout. The hash
is over the ranks, each with its place in its groups and the parameters, codec and algorithm of each range: on the same
layout the surplus comes back bit for bit, on any other it begins anew at zero, which is always valid
(collectives/feedback.py), and the run says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from torch import Tensor

from hpcllm.checkpoint.layout import Attribute, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.tensors import fill

SURPLUS = "feedback/surplus"
LAYOUT = "feedback/layout"


@dataclass(frozen=True)
class Surplus:
    """One rank's part of it, between two steps."""

    arrays: tuple[Tensor, ...]  # float32, the memory itself
    start: int  # of the first one, among the values of all ranks
    total: int  # values of all ranks, not 0
    layout: str

    def specs(self) -> dict[str, DatasetSpec]:
        return {SURPLUS: DatasetSpec((self.total,), "float32")}

    def attributes(self) -> dict[str, Attribute]:
        return {LAYOUT: self.layout}

    def slabs(self) -> dict[Slab, Tensor]:
        found, start = {}, self.start
        for array in self.arrays:
            if array.numel():
                found[Slab(SURPLUS, (start,), (array.numel(),))] = array
            start += array.numel()
        return found


def find_surplus(owed: Mapping[str, Tensor], comm: MPI.Intracomm) -> Surplus | None:
    """The place of this rank's arrays in a file; None if no rank owes anything. Collective over comm.

    owed: what an array belongs to, in words that differ wherever its values would mean something else -> its memory.
    """
    size = sum(array.numel() for array in owed.values())
    words = repr((comm.rank, comm.size, [(what, array.numel()) for what, array in owed.items()]))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    mine = np.array([size, int.from_bytes(digest, "little") if size else 0], dtype=np.uint64)
    sums, ends = np.empty_like(mine), np.empty_like(mine)
    comm.Allreduce(mine, sums)  # of unsigned words, so it wraps
    comm.Scan(mine, ends)
    if not sums[0]:
        return None
    return Surplus(tuple(owed.values()), int(ends[0]) - size, int(sums[0]), f"{int(sums[1]):016x}")


def restore_surplus(checkpoint: Checkpoint, surplus: Surplus) -> str:
    """Fill it from the file. Collective over checkpoint.comm. Raises CheckpointError if the file is damaged.

    Returns why it was not, "" if it was; nothing is owed then, whatever a damaged file has left there before.
    """
    for array in surplus.arrays:
        array.zero_()
    stored = checkpoint.datasets.get(SURPLUS)
    if stored is None:
        return "the checkpoint has none"
    if checkpoint.attributes.get(LAYOUT) != surplus.layout or stored.spec != surplus.specs()[SURPLUS]:
        return "the checkpoint's is of another layout, codec or bucket size"
    fill(checkpoint, list(surplus.slabs().items()))
    return ""
