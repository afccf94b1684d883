"""Lab 1: latency and bandwidth. Fill in this file, then run `hpcllm course check`. The sheet says what to do."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI


def ping_pong(comm: MPI.Intracomm, size_bytes: int, repeats: int) -> list[float]:
    """Measure messages of size_bytes between ranks 0 and 1. Collective over comm, of 2 ranks or more.

    Rank 0 sends, rank 1 answers with as many bytes: one round trip. One at least goes first that is not timed, as
    connections are made and memory is touched in it; then `repeats` are timed, each for itself. Returns on rank 0 the
    `repeats` times of one message, in seconds and in order, that is, half of each round trip; on other ranks an empty
    list. Ranks from 2 on send nothing. Any size, also 0.
    """
    raise NotImplementedError


def fit(sizes_bytes: Sequence[int], seconds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit seconds = alpha_s + beta_s * bytes to what was measured; seconds[i] are the repeats of sizes_bytes[i].

    Returns (alpha_s, beta_s), each right to 10 %, although the sizes come in any order, each size is off by up to 2 %,
    and one repeat in five came late, up to ten times.
    """
    raise NotImplementedError


def ring_s(ranks: int, size_bytes: float, alpha_s: float, beta_s: float) -> float:
    """Predict the seconds of a ring allreduce: 2 (p - 1) steps, a chunk of exactly size_bytes / p in each."""
    raise NotImplementedError


def doubling_s(ranks: int, size_bytes: float, alpha_s: float, beta_s: float) -> float:
    """Predict the seconds of a sum by recursive doubling, all of x in each step.

    Of p ranks 2^k <= p exchange in k steps; if p > 2^k, the others hand in theirs before and get the sum after.
    """
    raise NotImplementedError


def crossover_bytes(ranks: int, alpha_s: float, beta_s: float) -> float:
    """Find the size of x at which both take equally long, on 2 ranks or more; math.inf if the ring is never faster."""
    raise NotImplementedError


PREDICTIONS: dict[str, float | None] = {
    "half_kb": None,  # size, in 1000 bytes, of a message that gets half of the bandwidth
    "ring_ms": None,  # milliseconds of a ring over 64 ranks of 1e9 bytes
    "crossover_kb": None,  # size, in 1000 bytes, from which on a ring is faster on 16 ranks
}
