"""Checks of lab 2: a ring and a small sum, beside ours and the library's; both in a training run.

laws        sums of whole numbers, which no order rounds --> exact; each wrong result is compared with
            those of known mistakes, so that the hint names it
            sums of other numbers: near the sum in float64, the same bits everywhere
            traffic, counted by the communicator: bytes of the ring, messages of the small sum
            a run of the trainer whose gradients the student's ring sums: the losses of ours
races       long sums beside a ring, short ones beside recursive doubling, both in plain MPI (ours.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives.operations import ALGORITHMS
from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.allreduce.ours import REFERENCE, doubling, ring
from hpcllm.course.small_run import make_store, train_losses
from hpcllm.course.turns import quartiles
from hpcllm.mpi.partition import chunk_range
from hpcllm.perf.timing import Case

Values = NDArray[np.float32]
Sum = Callable[[Values, MPI.Intracomm], None]
LARGEST = 300_000  # values of a case: more than any MPI sends without waiting for the receiver
LONG_BYTES = (1 << 20, 1 << 22)
SHORT_BYTES = (256, 2048)
LONG_ROUNDS, SHORT_ROUNDS = 21, 61
STEPS = 3  # of the run
LOSS_ERROR = 1e-5  # relative: another order of sums
__all__ = ["LAB", "REFERENCE"]


def native(x: Values, comm: MPI.Intracomm) -> None:
    """Sum by the MPI library."""
    comm.Allreduce(MPI.IN_PLACE, x)


def lengths(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield numbers of values: first those in which most mistakes can be told apart, then few, none, many."""
    few = [ranks, 2 * ranks + 1, 1, ranks - 1, ranks + 1, drawn.randrange(20, 200), 0]
    yield from ({"n": n} for n in dict.fromkeys(few))
    yield {"n": drawn.randrange(LARGEST // 2, LARGEST)}


def few_lengths(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield a short and a long number of values."""
    yield {"n": drawn.randrange(ranks + 1, 50)}
    yield {"n": drawn.randrange(LARGEST // 2, LARGEST)}


def addends(trial: Trial, whole: bool) -> Values:
    """Draw the addends of all ranks (ranks, n): whole numbers that tell every rank and place, or any."""
    drawn = np.random.default_rng(trial.random.getrandbits(64))
    shape = trial.comm.size, trial.case["n"]
    if whole:
        return drawn.integers(1, 1000, shape).astype(np.float32)
    return drawn.standard_normal(shape).astype(np.float32)


def check_sums(trial: Trial, function: str = "allreduce") -> None:
    """Compare sums of whole numbers, which are exact in any order."""
    parts = addends(trial, whole=True)
    x = parts[trial.comm.rank].copy()
    before = x.copy()
    getattr(trial.student, function)(x, trial.comm)
    wanted = parts.sum(axis=0)
    if not np.array_equal(x, wanted):
        raise LawError(mistake(x, before, parts), f"{function}: {shown(trial, x, wanted)}")


def check_small_sums(trial: Trial) -> None:
    """Compare the small sums likewise, then count their messages."""
    check_sums(trial, "allreduce_small")
    most = 2 * max(0, (trial.comm.size - 1).bit_length())
    if trial.comm.messages > most:
        sent = f"rank {trial.comm.rank} of {trial.comm.size} sends {trial.comm.messages} messages; at most {most}"
        raise LawError("many_messages", sent)


def check_bits(trial: Trial) -> None:
    """Compare any numbers with their sum in float64, and the bits of all ranks; whole ones first, for the hint."""
    check_sums(trial, "allreduce_small")
    parts = addends(trial, whole=False)
    for function in ("allreduce", "allreduce_small"):
        x = parts[trial.comm.rank].copy()
        getattr(trial.student, function)(x, trial.comm)
        exact = parts.astype(np.float64).sum(axis=0)
        bound = trial.comm.size * np.finfo(np.float32).eps * np.abs(parts).sum(axis=0)
        if np.any(np.abs(x - exact) > bound):
            raise LawError("rounding", f"{function}: {shown(trial, x, exact)}")
        of_rank_0 = trial.control.bcast(x.tobytes() if trial.comm.rank == 0 else None)
        if of_rank_0 != x.tobytes():
            raise LawError("bits", f"{function}: {shown(trial, x, np.frombuffer(of_rank_0, np.float32))} on rank 0")


def check_traffic(trial: Trial) -> None:
    """Count the bytes that each rank sends."""
    x, ranks = np.ones(trial.case["n"], np.float32), trial.comm.size
    trial.student.allreduce(x, trial.comm)
    most = 2 * (ranks - 1) / ranks * x.nbytes + 4 * max(1, 2 * (ranks - 1))
    if trial.comm.sent_bytes > most:
        sent = f"rank {trial.comm.rank} of {ranks} sends {trial.comm.sent_bytes} bytes for n = {x.size}"
        raise LawError("traffic", f"{sent}; a ring sends {most:.0f} at most")


def few_values(_: random.Random, __: int) -> Iterator[Mapping[str, Any]]:
    """Yield the only case of the run."""
    yield {"steps": STEPS}


def check_run(trial: Trial) -> None:
    """Train with the student's sum of gradients and with our ring, and compare the losses."""
    store = make_store(trial.folder, trial.control)
    settings: dict[str, Any] = {"communication": {"algorithm": "ring"}, "mesh": {"dp": trial.control.size}}
    wanted = train_losses(store, trial.control, STEPS, **settings)
    sums = ALGORITHMS["allreduce"]
    ours = sums["ring"]
    sums["ring"] = lambda x, group, _: trial.student.allreduce(x.numpy(), group.comm)
    try:
        found = train_losses(store, trial.control, STEPS, **settings)
    finally:
        sums["ring"] = ours
    if any(abs(a - b) > LOSS_ERROR * abs(b) for a, b in zip(found, wanted, strict=True)):
        raise LawError("losses", f"losses {found}, with our ring {wanted}")


def mistake(x: Values, before: Values, parts: Values) -> str:
    """Tell a known mistake from its result: key of the hint."""
    ranks, n = parts.shape
    wanted = parts.sum(axis=0)
    wrong = np.flatnonzero(x != wanted)
    if np.array_equal(x, before):
        return "nothing"
    for mean in (wanted / ranks,):
        if np.allclose(x, mean):
            return "mean"
    if wrong[0] >= n - n % ranks and np.array_equal(x[wrong], before[wrong]):
        return "remainder"
    partial = [parts[list(rows)].sum(axis=0) for rows in subsets(ranks)]
    if all(any(x[i] == some[i] for some in partial) for i in wrong):
        return "incomplete"
    if np.all(x[wrong] > wanted[wrong]):
        return "twice"
    places = set(wrong.tolist())
    for rank in range(ranks):
        start, end = chunk_range(n, ranks, rank)
        if start < end and places.isdisjoint(range(start, end)):
            return "owner"
    return "other"


def subsets(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the sets of some but not all ranks."""
    for bits in range(1, (1 << ranks) - 1):
        yield tuple(rank for rank in range(ranks) if bits >> rank & 1)


def shown(trial: Trial, x: NDArray[Any], wanted: NDArray[Any]) -> str:
    """'rank 1 of 3, n = 5: place 4 is 7, not 9'."""
    place = int(np.flatnonzero(x != wanted)[0])
    values = f"place {place} is {x[place]:.9g}, not {wanted[place]:.9g}"
    return f"rank {trial.comm.rank} of {trial.comm.size}, n = {x.size}: {values}"


def race(trial: Trial, sizes: tuple[int, ...], function: Sum, reference: Sum, rounds: int) -> Iterator[Row]:
    """Time a student's function, ours and the library's in turns."""
    comm = MPI.Intracomm(trial.comm)
    for size_bytes in sizes:
        x = np.zeros(size_bytes // 4, np.float32)
        cases = [Case(partial(f, x, comm)) for f in (function, reference, native)]
        yield Row(f"{size_bytes} bytes", size_bytes, *quartiles(trial.control, cases, rounds))


def long_race(trial: Trial) -> Iterator[Row]:
    """Time long sums beside our ring."""
    yield from race(trial, LONG_BYTES, trial.student.allreduce, ring, LONG_ROUNDS)


def short_race(trial: Trial) -> Iterator[Row]:
    """Time short sums beside our recursive doubling."""
    yield from race(trial, SHORT_BYTES, trial.student.allreduce_small, doubling, SHORT_ROUNDS)


def count_messages(trial: Trial) -> float:
    """Count the messages that a rank sends for a long sum."""
    trial.comm.restart_counts()
    trial.student.allreduce(np.zeros(1000 * RANKS, np.float32), trial.comm)
    return trial.comm.messages


def count_bytes(trial: Trial) -> float:
    """Count the bytes that a rank sends for a sum of a million values."""
    trial.comm.restart_counts()
    trial.student.allreduce(np.zeros(1_000_000, np.float32), trial.comm)
    return trial.comm.sent_bytes


def count_rounds(trial: Trial) -> float:
    """Count the messages that rank 0 sends for a small sum."""
    trial.comm.restart_counts()
    trial.student.allreduce_small(np.zeros(8, np.float32), trial.comm)
    return trial.comm.messages


LAB = Lab(
    number=2,
    name="allreduce",
    title="a sum over all ranks",
    functions=("allreduce", "allreduce_small"),
    laws=(
        Law("sums", "allreduce leaves the sum on every rank, for any n", 20, lengths, check_sums),
        Law("bits", "every rank has the same bits, near the exact sum", 10, few_lengths, check_bits),
        Law("traffic", "no rank sends more than a ring does", 15, few_lengths, check_traffic),
        Law("small sums", "allreduce_small is right, in few messages", 10, lengths, check_small_sums),
        Law("run", "the trainer sums its gradients by it, with equal losses", 10, few_values, check_run, (3,), 60.0),
    ),
    races=(
        Race("long sums", "1 and 4 MiB on 4 ranks, beside our ring", 10, long_race, ((2.0, 1.0), (4.0, 0.5))),
        Race("short sums", "up to 2 KiB, beside our recursive doubling", 10, short_race, ((2.5, 1.0), (5.0, 0.5))),
    ),
    predictions=(
        Prediction("messages", "messages that one rank of 4 sends for a long sum", 5, count_messages),
        Prediction("bytes", "bytes that one rank of 4 sends for a million values", 5, count_bytes),
        Prediction("rounds", "messages that rank 0 of 4 sends for a small sum", 5, count_rounds),
    ),
    hints={
        "nothing": "x is as it was: the sum has to be written into x itself (x[:] = ..., x += ...); x = ... only gives "
        "another array that name.",
        "mean": "This is the mean; the sum is wanted.",
        "remainder": "The last values are wrong where n does not divide by the ranks: which chunk holds the rest?",
        "incomplete": "Some ranks' values are missing in some places. In the first half of the ring each chunk has to "
        "visit every rank; follow one chunk through all hops, and see which chunk a rank sends in each.",
        "twice": "Some values were added more than once: in the second half chunks replace, they are not added.",
        "owner": "Whole chunks are right and others wrong: after the first half, which chunk is complete on which "
        "rank? The second half has to begin with that one.",
        "rounding": "The sum is further from the exact one than float32 sums of so many values are.",
        "bits": "Ranks have different bits: each adds in an order of its own. Let one rank complete a chunk, and the "
        "others take its bytes.",
        "traffic": "Rank by rank the sum of bytes is above that of a ring: a rank sends chunks, never all of x.",
        "losses": "The sum is right alone, but not in a run, where sums of several arrays follow each other.",
        "many_messages": "Few messages means rounds in which partners at distance 1, 2, 4 ... exchange all they have.",
    },
    forbidden=(
        *("Allreduce", "Iallreduce", "Reduce", "Ireduce", "Allgather", "Allgatherv", "Reduce_scatter", "Alltoall"),
        *("Reduce_scatter_block", "Bcast", "Gather", "Gatherv", "allreduce", "reduce", "allgather", "alltoall"),
        *("bcast", "gather", "send", "isend", "recv", "irecv", "sendrecv", "Dup", "Split"),
    ),
)  # fmt: skip
