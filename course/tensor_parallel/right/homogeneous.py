"""The bias as one more input that is 1 (in rows: on rank 0); one product a pass."""

import numpy as np
from mpi4py import MPI


def _with_one(x):
    return np.hstack([x, np.ones((len(x), 1), x.dtype)])


def own_range(n, comm):
    return tuple(n * k // comm.size for k in (comm.rank, comm.rank + 1))


def columns(x, layers, comm):
    one = _with_one(x)
    return [one @ np.hstack([w, b[:, None]]).T for w, b in layers]


def columns_backward(gradients, x, layers, comm):
    g = np.hstack(gradients)
    of_x = g @ np.vstack([w for w, _ in layers])
    request = comm.Iallreduce(MPI.IN_PLACE, of_x)
    of_all = g.T @ _with_one(x)
    found, at = [], 0
    for w, _ in layers:
        found.append((of_all[at : at + len(w), :-1], of_all[at : at + len(w), -1]))
        at += len(w)
    request.Wait()
    return of_x, found


def rows(x, w, b, comm):
    own = _with_one(x) @ np.vstack([w.T, b[None] * (comm.rank == comm.size - 1)])
    y = np.empty(own.shape, np.float32)
    comm.Allreduce(own.astype(np.float32), y)
    return y


def rows_backward(gradient, x, w, comm):
    of_all = gradient.T @ _with_one(x)
    return gradient @ w, of_all[:, :-1], of_all[:, -1]


PREDICTIONS = {"weights": 2**19, "sums": 13, "bytes": 4096000}
