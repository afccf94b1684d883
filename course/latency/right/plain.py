"""Blocking messages, a weighted least-squares line, formulas as on the sheet."""

import math
import time

import numpy as np


def ping_pong(comm, size_bytes, repeats):
    data = np.zeros(size_bytes, dtype=np.uint8)
    seconds = []
    if comm.rank == 0:
        for _ in range(repeats + 1):
            start = time.perf_counter()
            comm.Send(data, dest=1)
            comm.Recv(data, source=1)
            seconds.append((time.perf_counter() - start) / 2)
        seconds = seconds[1:]
    elif comm.rank == 1:
        for _ in range(repeats + 1):
            comm.Recv(data, source=0)
            comm.Send(data, dest=0)
    return seconds


def fit(sizes_bytes, seconds):
    sizes = np.array(sizes_bytes, dtype=float)
    times = np.median(np.array(seconds), axis=1)
    beta, alpha = np.polyfit(sizes, times, 1, w=1 / times)
    return float(alpha), float(beta)


def ring_s(ranks, size_bytes, alpha_s, beta_s):
    return 2 * (ranks - 1) * (alpha_s + beta_s * size_bytes / ranks)


def doubling_s(ranks, size_bytes, alpha_s, beta_s):
    steps = ranks.bit_length() - 1
    if ranks != 2**steps:
        steps += 2
    return steps * (alpha_s + beta_s * size_bytes)


def crossover_bytes(ranks, alpha_s, beta_s):
    ring_steps = 2 * (ranks - 1)
    steps = ranks.bit_length() - 1 + 2 * (ranks & (ranks - 1) > 0)
    if steps * ranks <= ring_steps:
        return math.inf
    return alpha_s * (ring_steps - steps) / (beta_s * (steps - ring_steps / ranks))


PREDICTIONS = {"half_kb": 25, "ring_ms": 157.75, "crossover_kb": 305.9}
