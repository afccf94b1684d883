"""The update of the own range by PyTorch's AdamW, on views of the arrays."""

import numpy as np
import torch
from mpi4py import MPI


def ends(n, comm):
    return [sum(len(part) for part in np.array_split(np.empty(n), comm.size)[:rank]) for rank in range(comm.size + 1)]


def own_range(n, comm):
    return tuple(ends(n, comm)[comm.rank : comm.rank + 2])


def new_state(n, comm):
    start, end = own_range(n, comm)
    return dict(zip(("exp_avg", "exp_avg_sq"), np.zeros((2, end - start), np.float32)))


def update(parameters, gradients, state, step, config, comm):
    borders = ends(parameters.size, comm)
    start, end = borders[comm.rank : comm.rank + 2]
    counts = np.diff(borders)
    g = np.empty(end - start, np.float32)
    comm.Reduce_scatter([gradients, MPI.FLOAT], [g, MPI.FLOAT], counts.tolist(), MPI.SUM)
    g = torch.from_numpy(g).div_(comm.size)
    squares = np.array([float(g.double() @ g.double())])
    comm.Allreduce(MPI.IN_PLACE, squares)
    g.mul_(min(1.0, config.clip_norm / (squares[0] ** 0.5 + 1e-30)))
    weights = torch.nn.Parameter(torch.from_numpy(parameters[start:end]))
    weights.grad = g
    adamw = torch.optim.AdamW([weights], lr=config.learning_rate, betas=(config.beta1, config.beta2),
                              eps=config.epsilon, weight_decay=config.weight_decay)  # fmt: skip
    moments = {name: torch.from_numpy(array) for name, array in state.items()}
    adamw.state[weights] = {"step": torch.tensor(float(step - 1)), **moments}
    adamw.step()
    comm.Allgatherv(MPI.IN_PLACE, [parameters, (counts.tolist(), borders[:-1]), MPI.FLOAT])


PREDICTIONS = {"state_bytes": 2e6, "all_bytes": 1e7, "sent_bytes": 6e6}
