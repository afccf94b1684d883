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
from hpcllm.course.labs.allreduce.mistakes import mistake, small_mistake
from hpcllm.course.labs.allreduce.ours import REFERENCE, doubling, ring
from hpcllm.course.small_run import make_store, train_losses
from hpcllm.course.turns import quartiles
from hpcllm.perf.timing import Case

Values = NDArray[np.float32]
Sum = Callable[[Values, MPI.Intracomm], None]
LARGEST = 300_000  # values of a case: more than any MPI sends without waiting for the receiver
LONG_BYTES = (1 << 20, 1 << 22)
SHORT_BYTES = (256, 2048)
LONG_ROUNDS, SHORT_ROUNDS = 21, 61
STEPS = 3  # of the run
LIKELIEST = (1, 3, 2, RANKS)  # numbers of ranks: with three most mistakes can be told apart, with two hardly any
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
        is_small = function == "allreduce_small"
        hint = small_mistake(x, before, parts) if is_small else mistake(x, before, parts, trial.comm.rank)
        raise LawError(hint, f"{function}: {shown(trial, x, wanted)}")


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
    of_a_ring = 2 * (ranks - 1) / ranks * x.nbytes
    most = of_a_ring + 4 * max(1, trial.comm.messages)
    if trial.comm.sent_bytes > most:
        sent = f"rank {trial.comm.rank} of {ranks} sends {trial.comm.sent_bytes} bytes for n = {x.size}"
        hint = "hop_more" if trial.comm.sent_bytes <= most + x.nbytes / ranks + 4 else "traffic"
        if ranks == 2 and trial.comm.sent_bytes > 1.9 * of_a_ring:
            hint = "wide"
        raise LawError(hint, f"{sent}; a ring sends {most:.0f} at most")


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
        Law("sums", "allreduce leaves the sum on every rank, for any n", 20, lengths, check_sums, LIKELIEST),
        Law("bits", "every rank has the same bits, near the exact sum", 10, few_lengths, check_bits),
        Law("traffic", "no rank sends more than a ring does", 15, few_lengths, check_traffic),
        Law("small sums", "allreduce_small is right, in few messages", 10, lengths, check_small_sums, LIKELIEST),
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
        "few": "With fewer values than ranks some chunks are empty, but there is a sum all the same.",
        "turned": "The messages go round one way, and the chunks that you pick the other. If rank r sends to r + 1, "
        "what comes in a hop is the chunk that rank r - 1 sends in it.",
        "in_place": "What is received lands in the array that is to be added to, or sent: what that held is lost. "
        "Receive into another array, then add.",
        "lost_sums": "The sums of the first half are lost. Either what comes takes the place of the own chunk where it "
        "has to be added, or the second half begins with another chunk than the one that is complete by then.",
        "rebound": "chunk = chunk + theirs makes a new array, and x keeps the old one: chunk += theirs writes into x.",
        "hop_more": "One chunk more than in a ring is sent: each half has p - 1 hops.",
        "first_hops": "The first half has p - 1 hops: with one fewer a rank's values are missing in each chunk, with "
        "one more some are added twice.",
        "second_hops": "The second half has p - 1 hops, too: a chunk of each rank has not been handed on everywhere.",
        "small_incomplete": "Some ranks' values are missing. Partners are at distance 1, 2, 4 ... up to the largest "
        "below p; which ranks have no partner in a round, who adds up theirs, and who hands them the result?",
        "small_twice": "Some values are counted more than once: two partners have to hold sums of different ranks. "
        "rank + 2**i is that only for 2**k ranks; distances double; and x changes only when its send is over.",
        "wide": "Twice the bytes of a ring of float32: are the values sent as float64?",
        "rounding": "The sum is further from the exact one than float32 sums of so many values are.",
        "bits": "Ranks have different bits: each adds in an order of its own. Let one rank complete a chunk, and the "
        "others take its bytes.",
        "traffic": "Rank by rank the sum of bytes is above that of a ring: a rank sends chunks, never all of x.",
        "losses": "The sum is right alone, but not in a run, where sums of several arrays follow each other.",
        "predicts_messages": "A ring has two halves: how many hops has each, with 4 ranks?",
        "predicts_bytes": "How many bytes has a chunk, a quarter of a million values of 4 bytes, and how often is one "
        "sent?",
        "predicts_rounds": "In each round each rank sends one message. How many rounds do 4 ranks need?",
        "forbidden": "Other collectives do what this lab is about, and calls in lower case pack objects: build it from "
        "Send, Isend, Recv, Irecv and Sendrecv.",
        "many_messages": "Few messages means rounds in which partners at distance 1, 2, 4 ... exchange all they have.",
    },
    forbidden=(
        *("Ibcast", "Iallgather", "Iallgatherv", "Ireduce_scatter", "Ialltoall", "Alltoallv", "Scan", "Exscan"),
        *("Allreduce", "Iallreduce", "Reduce", "Ireduce", "Allgather", "Allgatherv", "Reduce_scatter", "Alltoall"),
        *("Reduce_scatter_block", "Bcast", "Gather", "Gatherv", "allreduce", "reduce", "allgather", "alltoall"),
        *("bcast", "gather", "send", "isend", "recv", "irecv", "sendrecv", "Dup", "Split"),
    ),
)  # fmt: skip
