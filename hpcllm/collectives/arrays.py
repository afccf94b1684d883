"""The caller's arrays <-> flat tensors in host memory, which is what the algorithms work on.

torch CPU, NumPy      the same memory, no copy
torch CUDA, CuPy      a copy in host memory, and back where the array was written   (not tested here: no GPU)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

Array: TypeAlias = Any  # torch.Tensor, numpy.ndarray or cupy.ndarray: one kind a call


def flat(x: Array, *, written: bool) -> torch.Tensor:
    """x as (n,) on the CPU. Raises ValueError if it is not contiguous, not writable though written, or no array."""
    if type(x) is torch.Tensor and x.is_cpu and not x.requires_grad:
        if not x.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(x.shape)}, strides {x.stride()} is not contiguous")
        return x.view(-1) if x.numel() else torch.empty(0, dtype=x.dtype)
    if isinstance(x, np.ndarray):
        return _of_numpy(x, written)
    if isinstance(x, torch.Tensor):
        return flat(x.detach().cpu(), written=written)
    if hasattr(x, "__dlpack__"):
        return flat(from_dlpack(x).cpu(), written=written)
    raise ValueError(f"expected a torch, NumPy or CuPy array, got {type(x).__name__}")


def write_back(values: torch.Tensor, x: Array) -> None:
    """Copy `values`, which flat(x) gave, into x where they are not x's own memory."""
    if isinstance(x, np.ndarray) or (isinstance(x, torch.Tensor) and x.is_cpu):
        return
    device = x.detach() if isinstance(x, torch.Tensor) else from_dlpack(x)
    device.view(-1).copy_(values)


def new_like(x: Array, shape: Sequence[int]) -> Array:
    """Uninitialised, of x's kind, dtype and device."""
    if isinstance(x, torch.Tensor):
        return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    library = np if isinstance(x, np.ndarray) else sys.modules[type(x).__module__.partition(".")[0]]
    return library.empty(tuple(shape), dtype=x.dtype)


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two flat tensors share memory."""
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def _of_numpy(x: np.ndarray[Any, Any], written: bool) -> torch.Tensor:
    if not x.flags.c_contiguous:
        raise ValueError(f"an array of shape {x.shape}, strides {x.strides} is not C-contiguous")
    if not x.flags.writeable:
        if written:
            raise ValueError(f"an array of shape {x.shape} is read-only, and the result goes there")
        x = x.copy()  # torch has no read-only tensors
    try:
        values = torch.from_numpy(x.reshape(-1))
    except TypeError as error:
        raise ValueError(f"an array of dtype {x.dtype} has no torch counterpart") from error
    return values if values.numel() else torch.empty(0, dtype=values.dtype)  # NumPy gives empty arrays a stride of 0
