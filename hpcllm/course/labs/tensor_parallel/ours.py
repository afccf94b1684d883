"""Our own layers in the shape that a student writes: what races and demonstrations run.

NumPy arrays --> tensors --> hpcllm.model.linear: columns, rows, and their autograd --> NumPy arrays
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from hpcllm.collectives import group_of
from hpcllm.model import linear
from hpcllm.model.linear import PassOptions, Weights
from hpcllm.model.tensor_parallel import TensorParallel, tensor_parallel
from hpcllm.mpi.partition import chunk_range

Values = NDArray[np.float32]
Layer = tuple[Values, Values]


def share(comm: MPI.Intracomm) -> TensorParallel:
    """Let the ranks share layers. Collective over comm."""
    return tensor_parallel(group_of(MPI.Intracomm(comm)))


def own_range(n: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return this rank's part of n."""
    return chunk_range(n, comm.size, comm.rank)


def _leaves(*arrays: Values) -> list[Tensor]:
    return [torch.from_numpy(array).requires_grad_() for array in arrays]


def _apply_columns(x: Values, layers: Sequence[Layer], comm: MPI.Intracomm) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    leaves = _leaves(x, *(array for layer in layers for array in layer))
    weights = [Weights(w, b) for w, b in zip(leaves[1::2], leaves[2::2], strict=True)]
    return linear.columns(leaves[0], weights, PassOptions(share(comm))), leaves


def columns(x: Values, layers: Sequence[Layer], comm: MPI.Intracomm) -> list[Values]:
    """Apply several layers that are split by outputs. Collective over comm."""
    return [y.detach().numpy() for y in _apply_columns(x, layers, comm)[0]]


def columns_backward(gradients: Sequence[Values], x: Values, layers: Sequence[Layer], comm: MPI.Intracomm) -> Any:
    """Return the gradients of x and of the layers. Collective over comm."""
    y, leaves = _apply_columns(x, layers, comm)
    of_x, *rest = (g.numpy() for g in torch.autograd.grad(y, leaves, [*map(torch.from_numpy, gradients)]))
    return of_x, list(zip(rest[::2], rest[1::2], strict=True))


def _apply_rows(x: Values, w: Values, b: Values, comm: MPI.Intracomm) -> tuple[Tensor, list[Tensor]]:
    leaves = _leaves(x, w, b)
    return linear.rows(leaves[0], Weights(leaves[1], leaves[2]), PassOptions(share(comm))), leaves


def rows(x: Values, w: Values, b: Values, comm: MPI.Intracomm) -> Values:
    """Apply a layer that is split by inputs. Collective over comm."""
    y: Values = _apply_rows(x, w, b, comm)[0].detach().numpy()
    return y


def rows_backward(gradient: Values, x: Values, w: Values, comm: MPI.Intracomm) -> Any:
    """Return the gradients of x, w and b. Collective over comm, as the pass forward is run anew."""
    y, leaves = _apply_rows(x, w, np.zeros(len(w), np.float32), comm)
    return tuple(g.numpy() for g in torch.autograd.grad(y, leaves, torch.from_numpy(gradient)))


def block(x: Values, up: Layer, down: Layer, comm: MPI.Intracomm) -> list[Values]:
    """Run a feed-forward block both ways: y, and the gradients of x, up and down. Collective over comm."""
    leaves = _leaves(x, *up, *down)
    options = PassOptions(share(comm))
    (high,) = linear.columns(leaves[0], [Weights(leaves[1], leaves[2])], options)
    y = linear.rows(high.relu(), Weights(leaves[3], leaves[4]), options)
    return [y.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(y, leaves, y.detach()))]


REFERENCE = SimpleNamespace(
    own_range=own_range, columns=columns, columns_backward=columns_backward, rows=rows, rows_backward=rows_backward
)
