"""All ranks read together: each block of what anyone wants is read and verified once, and travels to all in need.

    wanted     rank 0: columns 0-2 of w      plan: block 0 -> rank 0, block 1 -> rank 1       (plan.py, as in writing)
               rank 1: columns 3-5 of w
    rank 0     pread block 0, XXH3 --+---> own columns          so the file system sees each byte once, in large
    rank 1     pread block 1, XXH3 --+---> the other's columns  requests, whatever the split and however many replicas

What a rank wants lands where it wants it: in an array of the stored type there is no copy but the one from the file.
Works without MPI too, with a checkpoint that was opened so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcllm.checkpoint.exchange import from_owners, make_plan
from hpcllm.checkpoint.layout import STORED_AS
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.errors import CheckpointError
from hpcllm.together import raise_together


def fetch(checkpoint: Checkpoint, wanted: Sequence[tuple[Slab, np.ndarray]]) -> None:
    """Fill arrays with the slabs of this rank. Collective over checkpoint.comm.

    wanted: C-contiguous arrays in the slab's shape and the stored type (bfloat16 as uint16); slabs may share elements,
    or be the same. Raises CheckpointError on all ranks, naming what is damaged and who read it, or a slab that the file
    does not have; the arrays then hold anything.
    """
    raise_together(checkpoint.comm, _fault(checkpoint, wanted))
    arrays = dict(reversed(wanted))
    specs = {slab.dataset: checkpoint.datasets[slab.dataset].spec for slab in arrays}
    plan = make_plan(checkpoint.comm, specs, list(arrays), exactly_once=False)
    error = None
    try:
        from_owners(plan, checkpoint.comm, checkpoint.fill, arrays.__getitem__)
    except CheckpointError as fault:
        error = fault
    raise_together(checkpoint.comm, error)
    for slab, array in wanted:
        if array is not arrays[slab]:
            array[...] = arrays[slab]


def _fault(checkpoint: Checkpoint, wanted: Sequence[tuple[Slab, np.ndarray]]) -> CheckpointError | None:
    try:
        for slab, array in wanted:
            stored = STORED_AS[checkpoint.stored(slab).spec.dtype]
            if array.shape != slab.shape or array.dtype != stored or not array.flags.c_contiguous:
                raise CheckpointError(f"{slab} is stored as {stored}; it cannot be read to {array.dtype} {array.shape}")
    except CheckpointError as error:
        return error
    return None
