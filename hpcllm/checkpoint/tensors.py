"""Fill tensors from a checkpoint, of whatever type: straight where it is the stored one, else by way of memory aside.

    stored float32, wanted float32     file --> tensor
    stored float32, wanted bfloat16    file --> aside, float32 --> tensor      in rounds that bound what lies aside

A round is some of the file's datasets, the same on all ranks, so a block is still read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.fetch import fetch
from hpcllm.checkpoint.layout import STORED_AS
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.errors import CheckpointError
from hpcllm.together import raise_together

Wanted = Sequence[tuple[Slab, Tensor]]

_ASIDE_BYTES = 1 << 28  # or a dataset's, where that is more


def fill(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Fill this rank's tensors, each of a slab's shape, with its values. Collective over checkpoint.comm.

    Values are converted to the type of the tensor; where that is the stored type, to the bit. Raises CheckpointError on
    all ranks, as `fetch`.
    """
    aside_bytes, error = 0, None
    try:
        aside_bytes = sum(_aside_bytes(checkpoint, slab, tensor) for slab, tensor in wanted)
    except CheckpointError as fault:
        error = fault
    raise_together(checkpoint.comm, error)
    for names in _rounds(checkpoint, -(-_most(checkpoint, aside_bytes) // _ASIDE_BYTES)):
        _fill_at_once(checkpoint, [(slab, tensor) for slab, tensor in wanted if slab.dataset in names])


def _aside_bytes(checkpoint: Checkpoint, slab: Slab, tensor: Tensor) -> int:
    stored = checkpoint.stored(slab)
    return 0 if _memory(tensor, stored.spec.dtype) is not None else stored.bytes_of(slab)


def _most(checkpoint: Checkpoint, here: int) -> int:
    """The largest of a number on all ranks. Collective over checkpoint.comm."""
    if checkpoint.comm is None:
        return here
    from mpi4py import MPI

    most: int = checkpoint.comm.allreduce(here, MPI.MAX)
    return most


def _rounds(checkpoint: Checkpoint, rounds: int) -> Iterator[frozenset[str]]:
    """The names of the datasets of each round, of about as many bytes each."""
    sizes = {name: stored.spec.bytes for name, stored in checkpoint.datasets.items()}
    each = -(-sum(sizes.values()) // max(rounds, 1)) or 1
    ends = itertools.accumulate(sizes.values())
    for _, group in itertools.groupby(zip(sizes, ends, strict=True), key=lambda named: (named[1] - 1) // each):
        yield frozenset(name for name, _ in group)


@torch.no_grad()
def _fill_at_once(checkpoint: Checkpoint, wanted: Wanted) -> None:
    arrays, converted = [], []
    for slab, tensor in wanted:
        dtype = checkpoint.stored(slab).spec.dtype
        array = _memory(tensor, dtype)
        if array is None:
            array = np.empty(slab.shape, STORED_AS[dtype])
            converted.append((tensor, array, dtype))
        arrays.append((slab, array))
    fetch(checkpoint, arrays)
    for tensor, array, dtype in converted:
        values = torch.from_numpy(array)
        tensor.copy_(values.view(torch.bfloat16) if dtype == "bfloat16" else values)


def _memory(tensor: Tensor, dtype: str) -> np.ndarray | None:
    """The tensor's memory as an array of the stored type `dtype`; None if it is of another, strided or on a device."""
    if str(tensor.dtype) != f"torch.{dtype}" or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    values = tensor.detach()
    return (values.view(torch.uint16) if dtype == "bfloat16" else values).numpy()
