"""Double precision block by block through a generator; rounded once; the factor of the mean goes into the clip."""

from itertools import pairwise

import numpy as np
from mpi4py import MPI


def own_range(n, comm):
    first = -(-n * comm.rank // comm.size)
    return first, -(-n * (comm.rank + 1) // comm.size)


def _counts(n, comm):
    ends = [-(-n * rank // comm.size) for rank in range(comm.size + 1)]
    return [b - a for a, b in pairwise(ends)]


def new_state(n, comm):
    a, b = own_range(n, comm)
    both = np.zeros((b - a) * 2, np.float32)
    return {"exp_avg": both[: b - a], "exp_avg_sq": both[b - a :]}


def _blocks(length, block=1000):
    for at in range(0, length, block):
        yield slice(at, min(at + block, length))


def update(parameters, gradients, state, step, config, comm):
    counts = _counts(len(parameters), comm)
    a, b = own_range(len(parameters), comm)
    mean = np.empty(b - a, np.float32)
    comm.Reduce_scatter(gradients, mean, recvcounts=counts)
    mean *= np.float32(1 / comm.size)
    squares = np.zeros(1)
    for block in _blocks(b - a):
        squares += np.sum(mean[block].astype(np.float64) ** 2)
    comm.Allreduce(MPI.IN_PLACE, squares)
    scale = 1.0 if squares[0] <= config.clip_norm**2 else config.clip_norm / squares[0] ** 0.5
    own = parameters[a:b]
    for block in _blocks(b - a):
        g = mean[block].astype(np.float64) * scale
        m = config.beta1 * state["exp_avg"][block].astype(np.float64) + (1 - config.beta1) * g
        v = config.beta2 * state["exp_avg_sq"][block].astype(np.float64) + (1 - config.beta2) * g**2
        state["exp_avg"][block], state["exp_avg_sq"][block] = m, v
        weights = own[block].astype(np.float64) * (1 - config.learning_rate * config.weight_decay)
        m /= 1 - config.beta1**step
        v /= 1 - config.beta2**step
        own[block] = weights - config.learning_rate * m / (v**0.5 + config.epsilon)
    comm.Allgatherv(np.array(own), [parameters, counts])


PREDICTIONS = {"state_bytes": 2e6, "all_bytes": 1e7, "sent_bytes": 6e6}
