"""Element types of weights on their way: kept as they are, or rounded to the one that is asked for."""

from __future__ import annotations

import numpy as np
import torch

from hpcllm.errors import InterchangeError

ASKED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as on the command line -> as files have it


def as_tensor(values: np.ndarray, dtype: str) -> torch.Tensor:
    """The same memory; dtype: what it holds, where bfloat16 rests in uint16."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def cast(values: np.ndarray, stored: str, wanted: str, name: str) -> np.ndarray:
    """Values of one type in another, to the nearest; the array itself where they are the same.

    Raises InterchangeError if a number becomes infinite: fp16 ends at 65504.
    """
    if stored == wanted:
        return values
    before = as_tensor(values, stored)
    after = before.to(getattr(torch, wanted))
    if wanted == "float16" and not bool((after.isfinite() | ~before.isfinite()).all()):
        raise InterchangeError(f"{name} has values beyond fp16's largest, 65504; valid: --dtype bf16 or fp32")
    return after.view(torch.uint16).numpy() if wanted == "bfloat16" else after.numpy()
