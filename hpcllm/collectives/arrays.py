"""Views of the caller's arrays as flat tensors, which the algorithms work on: the same memory, no copy.

torch         on the CPU or a device
NumPy, CuPy   CuPy's by DLPack, which also has torch's current stream wait for CuPy's  (CuPy: not run yet, for want of a
              GPU)
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
    """View x as (n,) where it is. Raises ValueError if it is no array, not contiguous, or read-only though written."""
    if isinstance(x, np.ndarray):
        return _of_numpy(x, written)
    if isinstance(x, torch.Tensor):
        return _of_torch(x.detach() if x.requires_grad else x)
    if hasattr(x, "__dlpack__"):
        return _of_torch(from_dlpack(x))
    raise ValueError(f"expected a torch, NumPy or CuPy array, got {type(x).__name__}")


def device_of(x: Array) -> torch.device:
    """Device of x; the CPU if x is no array."""
    if isinstance(x, torch.Tensor):
        return x.device
    is_foreign = hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray)
    return from_dlpack(x).device if is_foreign else torch.device("cpu")


def new_like(x: Array, shape: Sequence[int]) -> Array:
    """New array, uninitialised, of x's kind, dtype and device."""
    if isinstance(x, torch.Tensor):
        return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
    library = np if isinstance(x, np.ndarray) else sys.modules[type(x).__module__.partition(".")[0]]
    return library.empty(tuple(shape), dtype=x.dtype)


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two flat tensors share memory."""
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def _of_torch(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(x.shape)}, strides {x.stride()} is not contiguous")
    return x.view(-1) if x.numel() else torch.empty(0, dtype=x.dtype, device=x.device)


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
