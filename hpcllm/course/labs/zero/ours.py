"""Our own update of a part of the states, in the shape that a student writes: what races and demonstrations run.

reduce-scatter of MPI --> PyTorch's fused AdamW, as hpcllm.optim has it --> all-gather of MPI

The trainer has hpcllm.collectives in their place. Those poll, so their time beside a student's blocking calls would say
more about the load of the machine than about the functions.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch.optim.adamw import adamw

from hpcllm.config.schema import OptimizerConfig
from hpcllm.mpi.partition import chunk_range

Values = NDArray[np.float32]
State = dict[str, Values]


def own_range(n: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return this rank's range of n values."""
    return chunk_range(n, comm.size, comm.rank)


def new_state(n: int, comm: MPI.Intracomm) -> State:
    """Return states for this rank's range of n parameters."""
    start, end = own_range(n, comm)
    return {name: np.zeros(end - start, np.float32) for name in ("exp_avg", "exp_avg_sq")}


def update(
    parameters: Values, gradients: Values, state: State, step: int, config: OptimizerConfig, comm: MPI.Intracomm
) -> None:
    """Make one step of AdamW. Collective over comm."""
    plain = MPI.Intracomm(comm)
    start, end = own_range(parameters.size, comm)
    borders = [chunk_range(parameters.size, comm.size, rank) for rank in range(comm.size)]
    lengths = [last - first for first, last in borders]
    received = np.empty(end - start, np.float32)
    plain.Reduce_scatter(gradients, received, lengths)
    share = torch.from_numpy(received)
    squares = np.array([share.double().square().sum().item()])
    plain.Allreduce(MPI.IN_PLACE, squares)
    divisor = comm.size * max(1.0, float(squares[0] ** 0.5) / comm.size / config.clip_norm)
    own = torch.from_numpy(parameters)[start:end]
    mean, mean_square = torch.from_numpy(state["exp_avg"]), torch.from_numpy(state["exp_avg_sq"])
    adamw([own], [share], [mean], [mean_square], [], [torch.tensor(step - 1.0)], fused=True,
          grad_scale=torch.tensor(divisor), amsgrad=False, beta1=config.beta1, beta2=config.beta2,
          lr=config.learning_rate, weight_decay=config.weight_decay, eps=config.epsilon, maximize=False)  # fmt: skip
    plain.Allgatherv(MPI.IN_PLACE, [parameters, lengths])


REFERENCE = SimpleNamespace(own_range=own_range, new_state=new_state, update=update)
