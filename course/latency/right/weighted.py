"""A ping-pong of requests, a fit by polyfit with weights, the model hop by hop."""

import statistics
from time import perf_counter

import numpy as np
from mpi4py import MPI


def one_way(comm, size_bytes, rounds):
    first, last = 0, comm.Get_size() - 1
    found = None
    if comm.Get_rank() in (first, last) and first != last:
        out, landing = bytearray(size_bytes), bytearray(size_bytes)
        peer = last if comm.Get_rank() == first else first
        times = []
        for turn in range(-1, rounds):
            start = perf_counter()
            request = comm.Irecv([landing, MPI.BYTE], source=peer)
            if comm.Get_rank() == last:
                request.Wait()
            comm.Isend([out, MPI.BYTE], dest=peer).Wait()
            if comm.Get_rank() == first:
                request.Wait()
            if turn >= 0:
                times.append(perf_counter() - start)
        found = statistics.median(times) / 2
    return comm.bcast(found, root=first) or 0.0


def fit(sizes_bytes, seconds):
    beta, alpha = np.polyfit(sizes_bytes, seconds, 1, w=1 / np.asarray(seconds))
    return alpha, beta


def predict_allreduce(alpha, beta, ranks, size_bytes):
    return sum(alpha + beta * size_bytes / ranks for _ in range(2 * (ranks - 1)))


PREDICTIONS = {"half": 2e4, "tree": 12, "ring": 197}
