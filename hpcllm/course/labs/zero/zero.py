"""Lab 6: each rank owns a part of the optimizer's states. Fill in this file, then run `hpcllm course check`.

All parameters of a model are one flat array of n float32 values. Each rank has a copy of it, and gradients of its own
part of the batch. The states of AdamW, two more values for each parameter, are there once, a part on each rank.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.config.schema import OptimizerConfig

Values = NDArray[np.float32]
State = dict[str, Values]


def own_range(n: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return start and end of what this rank owns of n values.

    The parts follow one another in the order of the ranks, cover 0 to n, and differ by one at most.
    """
    raise NotImplementedError


def new_state(n: int, comm: MPI.Intracomm) -> State:
    """Return the states for this rank's part of n parameters: "exp_avg" and "exp_avg_sq", float32 zeros."""
    raise NotImplementedError


def update(
    parameters: Values, gradients: Values, state: State, step: int, config: OptimizerConfig, comm: MPI.Intracomm
) -> None:
    """Make one step of AdamW: parameters (n,) are new on all ranks, state on its owner. Collective over comm.

    parameters: the same on all ranks, before and after. gradients (n,): of this rank, left as they are; the
    gradient of the step is their mean over the ranks. step: 1 for the first. n >= comm.size.

        norm = root of the sum of the squares of all n values of the mean gradient
        g = gradient * min(1, clip_norm / norm)                 (clip_norm and the rates: of config)
        exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        parameter -= learning_rate * weight_decay * parameter
        parameter -= learning_rate * a / (root of b + epsilon),  a = exp_avg / (1 - beta1**step), b likewise
    """
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "state_bytes": None,  # of the states of a million parameters, on one rank of 4
    "all_bytes": None,  # of parameters, gradients and states of a million parameters, on one rank of 4
    "sent_bytes": None,  # that a rank of 4 sends in one update of a million parameters
}
