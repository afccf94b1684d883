"""AdamW piece by piece, so that scratch memory stays small; the gathering is in place."""

import math

import numpy as np
from mpi4py import MPI

PIECE = 4096


def own_range(n, comm):
    part, rest = divmod(n, comm.size)
    start = comm.rank * part + min(comm.rank, rest)
    return start, start + part + int(comm.rank < rest)


def new_state(n, comm):
    first, last = own_range(n, comm)
    return {name: np.zeros((last - first,), dtype="f4") for name in ("exp_avg", "exp_avg_sq")}


def counts(n, comm):
    part, rest = divmod(n, comm.size)
    return [part + 1] * rest + [part] * (comm.size - rest)


def update(parameters, gradients, state, step, config, comm):
    first, last = own_range(len(parameters), comm)
    sizes = counts(len(parameters), comm)
    mine = np.zeros(last - first, dtype="f4")
    request = comm.Ireduce_scatter(gradients, mine, sizes, op=MPI.SUM)
    request.Wait()
    total = np.zeros(1)
    comm.Iallreduce(np.array([math.fsum(mine.astype("f8") ** 2)]), total).Wait()
    factor = 1 / comm.size
    factor *= min(1.0, config.clip_norm / max(math.sqrt(total[0]) / comm.size, 1e-300))
    for at in range(0, last - first, PIECE):
        here = slice(at, at + PIECE)
        _piece(parameters[first:last][here], mine[here] * np.float32(factor), state["exp_avg"][here],
               state["exp_avg_sq"][here], step, config)  # fmt: skip
    comm.Iallgatherv(MPI.IN_PLACE, [parameters, sizes]).Wait()


def _piece(weights, g, m, v, step, config):
    m += (g - m) * np.float32(1 - config.beta1)
    v += (g * g - v) * np.float32(1 - config.beta2)
    root = np.sqrt(v / np.float32(1 - config.beta2**step)) + np.float32(config.epsilon)
    move = m / np.float32(1 - config.beta1**step) / root + np.float32(config.weight_decay) * weights
    weights -= np.float32(config.learning_rate) * move


PREDICTIONS = {"state_bytes": 2 * 4 * 250_000, "all_bytes": 1e7, "sent_bytes": 2 * 3 / 4 * 4e6}
