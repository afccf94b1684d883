"""Requests, MPI's clock, the least of each size, a line through the two ends; a crossover by bisection."""

import math

import numpy as np
from mpi4py import MPI


def ping_pong(comm, size_bytes, repeats):
    if comm.rank > 1:
        return []
    mine, theirs = bytearray(size_bytes), bytearray(size_bytes)
    peer = 1 - comm.rank
    marks = []
    for _ in range(repeats + 3):
        begin = MPI.Wtime()
        if comm.rank == 0:
            requests = [comm.Irecv([theirs, MPI.BYTE], peer), comm.Isend([mine, MPI.BYTE], peer)]
            MPI.Request.Waitall(requests)
        else:
            comm.Irecv([theirs, MPI.BYTE], peer).Wait()
            comm.Isend([mine, MPI.BYTE], peer).Wait()
        marks.append(0.5 * (MPI.Wtime() - begin))
    return [] if comm.rank else marks[3:]


def fit(sizes_bytes, seconds):
    least = {size: min(times) for size, times in zip(sizes_bytes, seconds, strict=True)}
    ordered = sorted(least)
    first, last = ordered[0], ordered[-1]
    beta = (least[last] - least[first]) / (last - first)
    return least[first] - beta * first, beta


def ring_s(ranks, size_bytes, alpha_s, beta_s):
    total = 0.0
    for _ in range(2):
        for _ in range(ranks - 1):
            total += alpha_s + size_bytes / ranks * beta_s
    return total


def doubling_s(ranks, size_bytes, alpha_s, beta_s):
    step = alpha_s + size_bytes * beta_s
    total, distance = 0.0, 1
    while 2 * distance <= ranks:
        total += step
        distance *= 2
    return total + (2 * step if distance < ranks else 0)


def crossover_bytes(ranks, alpha_s, beta_s):
    def gain(size):
        return doubling_s(ranks, size, alpha_s, beta_s) - ring_s(ranks, size, alpha_s, beta_s)

    low, high = 0.0, 1e30
    if gain(high) <= 1e-9 * ring_s(ranks, high, alpha_s, beta_s):
        return math.inf
    for _ in range(300):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return float(np.float64(high))


PREDICTIONS = {"half_kb": 25.0, "ring_ms": 157.752, "crossover_kb": 305.88}
