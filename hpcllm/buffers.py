"""Tensor memory <-> MPI messages: the one place where tensors meet MPI.

    tensor (contiguous)  ->  its bytes, no copy  ->  pieces of at most 2^30 bytes  ->  nonblocking sends or receives

Messages are bytes because MPI has no portable 16-bit floats, and pieces because counts are 32-bit in most libraries.
The requests hold no reference to Python objects: whoever starts a transfer keeps the tensor until it has waited.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from mpi4py import MPI

LARGEST_MESSAGE_BYTES = 1 << 30


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as (bytes,) uint8, shared, not copied. Raises ValueError if not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} is not contiguous")
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # an empty tensor may have strides that no view can be made of
    return tensor.detach().view(-1).view(torch.uint8)


def isend(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
    """Start sending a CPU tensor's bytes to `peer`; a tensor without elements is no message at all."""
    return [comm.Isend([piece, MPI.BYTE], peer, tag) for piece in _pieces(tensor)]


def irecv(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
    """Start receiving into a CPU tensor what `peer` sends with isend: same number of bytes, same tag."""
    return [comm.Irecv([piece, MPI.BYTE], peer, tag) for piece in _pieces(tensor)]


def _pieces(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    memory = as_bytes(tensor).numpy()
    for start in range(0, memory.size, LARGEST_MESSAGE_BYTES):
        yield memory[start : start + LARGEST_MESSAGE_BYTES]
