"""AdamW by one kernel, on devices that kernels can be compiled for.

                                           bytes a value                                      launches
    ours, 16-bit weights and masters       30   reads 4 x 4, writes 3 x 4 and 2               1
    ours, 32-bit weights                   28                                                 1
    PyTorch's fused kernel, and a copy     34   28, and 4 + 2 for the weights of 16 bits      3, or 4 with vectors
    ... with gradients to be divided       38   as they are written, too                      4, or 5

The gradients are divided in registers. All arrays of a share are flat, so one launch goes over it, whatever parameters
begin and end in it; what is decayed and what is not follows from a few edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LANES, VALUE_NAMES, Launcher
from hpcllm.config.schema import OptimizerConfig

GROUP_VALUES = 8 * LANES  # that a group takes, as adamw.cu says


@dataclass(frozen=True)
class Operands:
    """Memory that an update goes over, (n,) float32 each and flat, on one device.

    edges: ascending places. Values before the first are decayed, those up to the next are not, and so on by turns.
    """

    weights: Tensor  # the model's own, or masters where the model has 16 bits
    gradients: Tensor  # sums
    exp_avg: Tensor
    exp_avg_sq: Tensor
    edges: tuple[int, ...] = ()
    table: Tensor = field(init=False)  # the edges, (e,) int64, on the device

    def __post_init__(self) -> None:
        table = torch.tensor(self.edges, dtype=torch.int64, device=self.weights.device)
        object.__setattr__(self, "table", table)


@dataclass(frozen=True)
class Numbers:
    """Numbers of one update, the same for all values."""

    number: int  # of the update, from 1
    learning_rate: float
    divisor: float  # of the gradients: the loss scale, and how far the norm is above its limit
    config: OptimizerConfig

    def words(self) -> list[int]:
        """Return what the kernel takes: eight float32 in four words. Corrections of the bias are made in float64."""
        c = self.config
        correction = float(np.sqrt(1 - c.beta2**self.number))
        rate = self.learning_rate / (1 - c.beta1**self.number)
        decay = 1 - self.learning_rate * c.weight_decay
        numbers = [self.divisor, decay, 1 - c.beta1, c.beta2, 1 - c.beta2, correction, c.epsilon, -rate]
        with np.errstate(over="ignore"):  # a norm beyond float32: the gradients become 0
            words: list[int] = np.array(numbers).astype(np.float32).view(np.uint64).tolist()
        return words


def update(launcher: Launcher, operands: Operands, numbers: Numbers, narrowed: Tensor | None = None) -> None:
    """Update weights and moments in place, in one pass and one launch; the gradients stay as they are.

    narrowed: (n,) float32, bfloat16 or float16, the model's weights, which become the new ones, rounded to nearest.
    """
    n = operands.weights.numel()
    dtype = torch.float32 if narrowed is None else narrowed.dtype
    arrays = [operands.gradients, operands.exp_avg, operands.exp_avg_sq, operands.weights]
    edges: list[Tensor | int] = [operands.table if operands.edges else 0, len(operands.edges)]
    rounded: Tensor | int = 0 if narrowed is None else narrowed
    arguments = [*arrays, rounded, *edges, *numbers.words(), n]
    launcher.launch(program(dtype), "update", -(-n // GROUP_VALUES), arguments)


def program(dtype: torch.dtype) -> Program:
    """Return the text of the kernel for a model's weights of a type."""
    return Program("adamw", (f"VALUE={VALUE_NAMES[dtype]}",), folder=Path(__file__).parent)
