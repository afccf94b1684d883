"""Requests in a while loop, all of which gather the median; the fit by a QR of scaled columns."""

import statistics
import time

import numpy as np


def one_way(comm, size_bytes, rounds):
    p, me = comm.size, comm.rank
    mine = []
    buffer = memoryview(bytearray(max(size_bytes, 1)))[:size_bytes]
    n = -1
    while n < rounds and p > 1:
        tick = time.perf_counter()
        if me == 0:
            comm.Isend(buffer, p - 1, 3).wait()
            comm.Irecv(buffer, p - 1, 4).wait()
        if me == p - 1:
            comm.Irecv(buffer, 0, 3).Wait()
            comm.Isend(buffer, 0, 4).Wait()
        if n >= 0:
            mine.append((time.perf_counter() - tick) * 0.5)
        n += 1
    return comm.allgather(statistics.median(mine) if mine else 0.0)[0]


def fit(sizes_bytes, seconds):
    sizes, times = np.array(sizes_bytes, float), np.array(seconds, float)
    scales = np.array([times.min(), times.max() / max(sizes.max(), 1.0)])
    jacobian = np.array([[1.0 / t, s / t] for s, t in zip(sizes, times)]) * scales
    q, r = np.linalg.qr(jacobian)
    alpha, beta = np.linalg.solve(r, q.T @ np.ones_like(times)) * scales
    return alpha, beta


def predict_allreduce(alpha, beta, ranks, size_bytes):
    return 2 * (alpha * (ranks - 1) + beta * (size_bytes - size_bytes / ranks))


PREDICTIONS = {"half": 20000.0, "tree": 12, "ring": 197.127}
