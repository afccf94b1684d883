"""All layers that read one x are one product, of weights put one below the other."""

import numpy as np
from mpi4py import MPI


def own_range(n, comm):
    pieces = np.array_split(np.arange(n), comm.size)
    ends = np.cumsum([0] + [len(piece) for piece in pieces])
    return ends[comm.rank], ends[comm.rank + 1]


class _Stack:
    def __init__(self, layers):
        self.w = np.concatenate([w for w, _ in layers])
        self.b = np.concatenate([b for _, b in layers])
        self.ends = np.cumsum([len(b) for _, b in layers])[:-1]


def columns(x, layers, comm):
    stack = _Stack(layers)
    return np.split(np.dot(x, stack.w.T) + stack.b, stack.ends, axis=1)


def columns_backward(gradients, x, layers, comm):
    stack, gradient = _Stack(layers), np.concatenate(gradients, axis=1)
    of_x = np.dot(gradient, stack.w)
    total = np.zeros(of_x.shape, dtype=np.float32)
    comm.Allreduce([of_x, MPI.FLOAT], [total, MPI.FLOAT], op=MPI.SUM)
    of_w = np.split(np.dot(gradient.T, x), stack.ends)
    of_b = np.split(gradient.sum(axis=0), stack.ends)
    return total, list(zip(of_w, of_b))


def rows(x, w, b, comm):
    own = np.ascontiguousarray(np.dot(x, w.T))
    comm.Allreduce(MPI.IN_PLACE, [own, MPI.FLOAT], op=MPI.SUM)
    own += b
    return own


def rows_backward(gradient, x, w, comm):
    return np.dot(gradient, w), np.dot(x.T, gradient).T, np.add.reduce(gradient, axis=0)


PREDICTIONS = {"weights": 524288.0, "sums": 13, "bytes": 4096000}
