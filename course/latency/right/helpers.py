"""Small functions: one end each for the two ranks, slopes of all pairs of sizes, a crossover from two differences."""

from array import array
from itertools import combinations
from math import inf, log2
from statistics import median
from time import perf_counter_ns

from mpi4py import MPI


def first_end(comm, box):
    begin = perf_counter_ns()
    comm.Ssend([box, MPI.BYTE], 1)
    comm.Recv([box, MPI.BYTE], 1)
    return (perf_counter_ns() - begin) * 0.5e-9


def second_end(comm, box):
    request = comm.Irecv([box, MPI.BYTE], 0)
    while not request.Test():
        pass
    comm.Send([box, MPI.BYTE], 0)


def ping_pong(comm, size_bytes, repeats):
    box = array("b", bytes(size_bytes))
    if comm.rank > 1:
        return ()
    end = second_end if comm.rank else first_end
    seconds = [end(comm, box) for _ in range(2 + repeats)]
    return () if comm.rank else tuple(seconds[2:])


def fit(sizes_bytes, seconds):
    points = sorted((size, median(times)) for size, times in zip(sizes_bytes, seconds, strict=True))
    long = points[len(points) // 2 :]
    beta = median((t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in combinations(long, 2))
    alpha = median(t - beta * s for s, t in points[:3])
    return [alpha, beta]


def ring_s(ranks, size_bytes, alpha_s, beta_s):
    return sum(alpha_s + beta_s * size_bytes / ranks for _ in range(2 * ranks - 2))


def doubling_s(ranks, size_bytes, alpha_s, beta_s):
    whole = int(log2(ranks))
    return (whole + 2 * (2**whole < ranks)) * (alpha_s + beta_s * size_bytes)


def crossover_bytes(ranks, alpha_s, beta_s):
    latency = ring_s(ranks, 0, alpha_s, 0) - doubling_s(ranks, 0, alpha_s, 0)
    slope = doubling_s(ranks, 1, 0, beta_s) - ring_s(ranks, 1, 0, beta_s)
    return latency / slope if slope > 1e-9 * beta_s else inf


PREDICTIONS = {"half_kb": 25, "ring_ms": 157.75, "crossover_kb": 305.88}
