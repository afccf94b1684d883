"""Lab 5: linear layers split over ranks. Fill in this file, then run `hpcllm course check`.

A layer is y = x w^T + b, with x (tokens, inputs), w (outputs, inputs), b (outputs,), y (tokens, outputs).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Values = NDArray[np.float32]
Layer = tuple[Values, Values]  # w, b: what this rank has of them


def own_range(n: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return start and end of this rank's part of n outputs, or of n inputs.

    The parts follow one another in the order of the ranks, cover 0 to n, and differ by one at most.
    """
    raise NotImplementedError


def columns(x: Values, layers: Sequence[Layer], comm: MPI.Intracomm) -> list[Values]:
    """Apply several layers to one x: this rank's outputs of each. Collective over comm.

    x is whole, the same on all ranks; of w and b this rank has its own outputs. Nothing is sent.
    """
    raise NotImplementedError


def columns_backward(
    gradients: Sequence[Values], x: Values, layers: Sequence[Layer], comm: MPI.Intracomm
) -> tuple[Values, list[Layer]]:
    """Return the gradient of x, whole, and those of each layer's w and b. Collective over comm.

    gradients: of what `columns` returned, one a layer. One sum over the ranks, however many layers there are.
    """
    raise NotImplementedError


def rows(x: Values, w: Values, b: Values, comm: MPI.Intracomm) -> Values:
    """Apply one layer to an x that is split: y, whole, the same on all ranks. Collective over comm.

    x (tokens, own inputs), w (outputs, own inputs): this rank's part; b is whole, the same on all ranks. One sum.
    """
    raise NotImplementedError


def rows_backward(gradient: Values, x: Values, w: Values, comm: MPI.Intracomm) -> tuple[Values, Values, Values]:
    """Return the gradients of x, w (this rank's parts) and b (whole). gradient: of y, whole. Nothing is sent."""
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "weights": None,  # values of w that one rank of 4 has of a feed-forward block: 512 to 2048 and back to 512
    "sums": None,  # sums that columns, rows and their backward passes start in a step of a decoder of 3 layers
    "bytes": None,  # that go into those of one feed-forward block: 1000 tokens of 512 values, forward and backward
}
