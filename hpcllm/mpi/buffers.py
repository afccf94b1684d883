"""Tensor memory <-> MPI messages: the one place where tensors meet MPI.

    tensor (contiguous)  ->  its bytes, no copy  ->  pieces of at most 2^30 bytes  ->  nonblocking sends or receives

Messages are bytes because MPI has no portable 16-bit floats, and pieces because counts are 32-bit in most libraries.
The requests hold no reference to Python objects: whoever starts a transfer keeps the tensor until it has waited. A
tensor of a device is handed over as its address: only to an MPI that reads it, and only when the device's stream is
done with it, see mpi/message_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mpi4py import MPI

LARGEST_MESSAGE_BYTES = 1 << 30


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's memory as (bytes,) uint8; nothing is copied. Raises ValueError if not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} is not contiguous")
    if not tensor.numel():
        # an empty tensor may have strides that no view can be made of
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().view(-1).view(torch.uint8)


def isend(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
    """Start sending a tensor's bytes to `peer`; a tensor without elements is no message at all."""
    return [comm.Isend([piece, MPI.BYTE], peer, tag) for piece in _pieces(tensor)]


def irecv(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int, tag: int) -> list[MPI.Request]:
    """Start receiving into a tensor the message that `peer` sends with isend: same number of bytes, same tag."""
    return [comm.Irecv([piece, MPI.BYTE], peer, tag) for piece in _pieces(tensor)]


def as_buffer(tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor's memory as a buffer for mpi4py. Raises ValueError if not contiguous."""
    memory = as_bytes(tensor)
    return memory.numpy() if memory.is_cpu else MPI.buffer.fromaddress(memory.data_ptr(), memory.numel())


def _pieces(tensor: torch.Tensor) -> Iterator[Any]:
    memory = as_buffer(tensor)
    for start in range(0, tensor.nbytes, LARGEST_MESSAGE_BYTES):
        yield memory[start : start + LARGEST_MESSAGE_BYTES]
