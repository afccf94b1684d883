"""Persistent requests, started anew in each round."""

import numpy as np
from mpi4py import MPI


def one_way(comm, size_bytes, rounds):
    if comm.size == 1:
        return 0.0
    last = comm.size - 1
    out = np.zeros(size_bytes, dtype=np.uint8)
    back = np.empty(size_bytes, dtype=np.uint8)
    times = []
    if comm.rank in (0, last):
        peer = last - comm.rank
        send, recv = comm.Send_init(out, dest=peer), comm.Recv_init(back, source=peer)
        order = (send, recv) if comm.rank == 0 else (recv, send)
        for i in range(rounds + 1):
            t0 = MPI.Wtime()
            for request in order:
                request.Start()
                request.Wait()
            times += [MPI.Wtime() - t0] * (i > 0)
        send.Free()
        recv.Free()
    result = np.median(times) / 2 if comm.rank == 0 else None
    return comm.bcast(result, root=0)


def fit(sizes_bytes, seconds):
    s = np.asarray(sizes_bytes, dtype=float)
    t = np.asarray(seconds, dtype=float)
    a = np.vstack([np.ones(len(s)) / t, s / t]).T
    (alpha, beta), *_ = np.linalg.lstsq(a, np.ones(len(s)), rcond=None)
    return float(alpha), float(beta)


def predict_allreduce(alpha, beta, ranks, size_bytes):
    chunk = size_bytes / ranks
    return 2 * (ranks - 1) * (alpha + beta * chunk)


PREDICTIONS = {"half": 20000, "tree": 12, "ring": 197}
