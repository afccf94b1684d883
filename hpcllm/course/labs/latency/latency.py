"""Lab 1: latency and bandwidth. Fill in this file, then run `hpcllm course check`."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI


def one_way(comm: MPI.Intracomm, size_bytes: int, rounds: int) -> float:
    """Return the seconds that a message of so many bytes takes from rank 0 to the last rank: half a ping-pong's.

    Collective over comm; with one rank 0.0. Each of the rounds is a message there and one back, of size_bytes bytes
    each, from the first call on; one more round, to warm up, comes before. All ranks return the same number, the median
    of the rounds, as one that the system held up says nothing about the network.
    """
    raise NotImplementedError


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (alpha, beta) such that alpha + beta * size comes near the seconds: latency, seconds a byte.

    Relative errors count alike at all sizes: the sum of ((alpha + beta * size - seconds) / seconds) ** 2 is the least.
    """
    raise NotImplementedError


def predict_allreduce(alpha: float, beta: float, ranks: int, size_bytes: int) -> float:
    """Return the seconds that a ring takes to sum arrays of so many bytes over these ranks, additions not counted."""
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "half": None,  # bytes at which half the time is latency, if alpha is 2 us and a second moves 10 GB
    "tree": None,  # us: an 8-byte value from rank 0 to 63 others by a binomial tree, with that network
    "ring": None,  # ms: a ring sum of 1 GB over 64 ranks, with that network
}
