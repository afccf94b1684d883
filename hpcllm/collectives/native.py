"""`native`: the MPI library's own allreduce, the baseline. fp32 only: MPI cannot add up our codes."""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpcllm.buffers import LARGEST_MESSAGE_BYTES
from hpcllm.codecs import RAW, Codec
from hpcllm.waiting import Waits


def native_allreduce(
    x: torch.Tensor,
    comm: MPI.Intracomm,
    codec: Codec,
    waits: Waits,
    scratch: torch.Tensor | None = None,  # noqa: ARG001 -- the library brings its own
) -> int:
    """Sum x (n,) float32 over comm in place. Collective over comm. Raises ValueError with a codec other than raw."""
    if codec is not RAW:
        raise ValueError(f"native allreduce sends fp32 only; codec {codec.name} needs the algorithm ring")
    memory = x.detach().numpy()
    step = LARGEST_MESSAGE_BYTES // x.element_size()
    for start in range(0, x.numel(), step):
        piece = memory[start : start + step]
        waits.allreduce(comm, piece, lambda: f"the library's allreduce over {comm.size} ranks")
    return 0
