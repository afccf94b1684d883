"""Collectives over (array, communicator, codec): MPI moves bytes, we reduce. They know no model.

`allreduce` is the front door; each algorithm is one short file beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from hpcllm.codecs import RAW, Codec
from hpcllm.collectives.native import native_allreduce
from hpcllm.collectives.ring import ring_allreduce, ring_scratch_bytes
from hpcllm.waiting import Waits

ALGORITHMS: dict[str, Callable[..., int]] = {"ring": ring_allreduce, "native": native_allreduce}


def allreduce(
    x: torch.Tensor,
    comm: MPI.Intracomm,
    codec: Codec = RAW,
    algorithm: str = "ring",
    waits: Waits | None = None,
    scratch: torch.Tensor | None = None,
) -> int:
    """Sum x over comm, in place; every rank ends with the same bits, and with the same bits in every run.

    x: (n,) float32, contiguous, any n >= 0, the same n on every rank. waits: limit of each wait (default 600 s).
    scratch: (ring_scratch_bytes(n, comm.size, codec),) uint8 to work in; allocated where it is not given. Returns the
    bytes that this rank sent, 0 where the library does not say. Collective over comm.
    Raises ValueError for another dtype, shape or algorithm, StallError past the limit.
    """
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"allreduce takes a contiguous (n,) float32 tensor, not {tuple(x.shape)} {x.dtype}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is unknown; valid: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm](x, comm, codec, waits or Waits(limit_s=600.0), scratch)


__all__ = ["ALGORITHMS", "allreduce", "ring_scratch_bytes"]
