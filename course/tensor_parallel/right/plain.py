"""One product a line; one sum a function that needs it."""

import numpy as np
from mpi4py import MPI


def own_range(n, comm):
    return n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size


def columns(x, layers, comm):
    return [x @ w.T + b for w, b in layers]


def columns_backward(gradients, x, layers, comm):
    of_x = np.zeros_like(x)
    for gradient, (w, _) in zip(gradients, layers):
        of_x += gradient @ w
    comm.Allreduce(MPI.IN_PLACE, of_x)
    of_layers = [(gradient.T @ x, gradient.sum(axis=0)) for gradient in gradients]
    return of_x, of_layers


def rows(x, w, b, comm):
    y = x @ w.T
    comm.Allreduce(MPI.IN_PLACE, y)
    return y + b


def rows_backward(gradient, x, w, comm):
    of_x = gradient @ w
    of_w = gradient.T @ x
    of_b = gradient.sum(axis=0)
    return of_x, of_w, of_b


PREDICTIONS = {"weights": 524_288, "sums": 13, "bytes": 4_096_000}
