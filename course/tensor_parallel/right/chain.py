"""Sums by messages: up a chain to the last rank and back, so that all have the same bits."""

import numpy as np


def _sum(a, comm):
    a = np.array(a, dtype=np.float32, order="C")
    p, r = comm.size, comm.rank
    other = np.empty_like(a)
    if r > 0:
        comm.Recv(other, source=r - 1)
        np.add(other, a, out=a)
    if r < p - 1:
        comm.Send(a, dest=r + 1)
        comm.Recv(a, source=r + 1)
    if r > 0:
        comm.Send(a, dest=r - 1)
    return a


def own_range(n, comm):
    cuts = [(n * k + comm.size - 1) // comm.size for k in range(comm.size + 1)]
    return cuts[comm.rank], cuts[comm.rank + 1]


def columns(x, layers, comm):
    return [(w @ x.T).T + b for w, b in layers]


def columns_backward(gradients, x, layers, comm):
    of_x = _sum(np.add.reduce([g @ w for g, (w, _) in zip(gradients, layers, strict=True)]), comm)
    return of_x, [(np.tensordot(g, x, axes=(0, 0)), np.einsum("to->o", g)) for g in gradients]


def rows(x, w, b, comm):
    return _sum((w @ x.T).T, comm) + b


def rows_backward(gradient, x, w, comm):
    return np.tensordot(gradient, w, 1), np.tensordot(gradient, x, ([0], [0])), np.ones(len(x), np.float32) @ gradient


PREDICTIONS = {"weights": 524288, "sums": 13, "bytes": 4096000}
