"""A ping-pong with blocking calls, a fit by lstsq, the formula."""

import time

import numpy as np


def one_way(comm, size_bytes, rounds):
    last = comm.size - 1
    data, times = np.zeros(size_bytes, np.uint8), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        if comm.rank == 0 and last:
            comm.Send(data, dest=last)
            comm.Recv(data, source=last)
        elif comm.rank == last and last:
            comm.Recv(data, source=0)
            comm.Send(data, dest=0)
        times.append((time.perf_counter() - start) / 2)
    median = sorted(times[1:])[rounds // 2]
    return comm.bcast(median if last else 0.0, root=0)


def fit(sizes_bytes, seconds):
    sizes, times = np.array(sizes_bytes), np.array(seconds)
    columns = np.stack([1 / times, sizes / times]).T
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    return alpha, beta


def predict_allreduce(alpha, beta, ranks, size_bytes):
    return 2 * (ranks - 1) * (alpha + beta * size_bytes / ranks)


PREDICTIONS = {"half": 20_000, "tree": 12.0, "ring": 197.1}
