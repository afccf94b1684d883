"""Checks of lab 1: the ping-pong's messages are counted, the fit is held against exact lines, the model against a ring.

one_way            messages: rounds + 1 each way, of that size    time: rounds that the last rank makes longer, each by
                                                               another time, beside the grader's clock (clock.py)
fit                lines with and without errors drawn by us      the least sum of relative squares
predict_allreduce  the formula, over random networks              then from the student's own measurement
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.course.lab import Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.latency.clock import check_median, slow_rounds

ROUNDS, PAIRS = 15, 9  # of a measurement; measurements of each in the race, in turns
SIZES_BYTES = (8, 1 << 12, 1 << 16, 1 << 20)  # of the race
ALPHA_S, BETA_S = 2e-6, 1e-10  # of the sheet's network
CLOSE = 1e-6  # relative, of formulas
FIT_ERROR = 1e-3  # relative, of a least-squares fit


def one_way(comm: MPI.Intracomm, size_bytes: int, rounds: int) -> float:
    """Time a ping-pong between rank 0 and the last rank."""
    last, data = comm.size - 1, np.zeros(size_bytes, np.uint8)
    times = np.zeros(rounds + 1)
    if last and comm.rank in (0, last):
        for turn in range(rounds + 1):
            start_s = time.perf_counter()
            if comm.rank == 0:
                comm.Send(data, dest=last)
                comm.Recv(data, source=last)
            else:
                comm.Recv(data, source=0)
                comm.Send(data, dest=0)
            times[turn] = (time.perf_counter() - start_s) / 2
    found: float = comm.bcast(float(np.median(times[1:])))
    return found


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares of relative errors."""
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    scale = np.abs(columns).max(axis=0)  # sizes and ones differ by many digits
    alpha, beta = np.linalg.lstsq(columns / scale, np.ones(sizes.size), rcond=None)[0] / scale
    return float(alpha), float(beta)


def predict_allreduce(alpha: float, beta: float, ranks: int, size_bytes: int) -> float:
    """Return 2 (p - 1) (alpha + beta b / p)."""
    return 2 * (ranks - 1) * (alpha + beta * size_bytes / ranks)


REFERENCE = SimpleNamespace(one_way=one_way, fit=fit, predict_allreduce=predict_allreduce)


def messages(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield sizes and numbers of rounds."""
    yield {"size_bytes": 8, "rounds": 1}
    yield {"size_bytes": 0, "rounds": 3}
    yield {"size_bytes": drawn.randrange(1, 5000), "rounds": drawn.randrange(2, 8)}
    yield {"size_bytes": drawn.randrange(1 << 18, 1 << 19), "rounds": drawn.randrange(2, 5)}


def check_messages(trial: Trial) -> None:
    """Count the messages and bytes of the two ranks, and look at what comes back."""
    comm, size_bytes, rounds = trial.comm, trial.case["size_bytes"], trial.case["rounds"]
    start_s = time.perf_counter()
    if comm.size == 1:
        alone(comm)
    found = trial.student.one_way(comm, size_bytes, rounds)
    took_s = time.perf_counter() - start_s
    case = f"rank {comm.rank} of {comm.size}, {size_bytes} bytes, {rounds} rounds"
    if not isinstance(found, float | int) or isinstance(found, bool):
        raise LawError("no_number", f"{case}: returns a {type(found).__name__}")
    counts = trial.control.allgather((comm.messages, comm.sent_bytes, float(found)))
    starts_unseen = trial.control.allreduce(comm.is_persistent, MPI.LOR)
    check_counts(counts, size_bytes, rounds, case, starts_unseen)
    longest_s = max(trial.control.allgather(took_s))
    if comm.size > 1 and not 0 < found <= longest_s / max(1, 2 * rounds) * 2:
        raise LawError("both_ways" if found <= longest_s else "unit", f"{case}: {found:.3g} s, in {longest_s:.3g} s")


def alone(comm: Any) -> None:
    """Let a rank that has nobody to send to end with the hint, not in a deadlock."""

    def sends(*_: Any, **__: Any) -> None:
        raise LawError("alone", "1 rank: the function sends or receives")

    for name in ("Send", "Ssend", "Isend", "Issend", "Recv", "Irecv"):
        setattr(comm, name, sends)


def check_counts(
    counts: Sequence[tuple[int, int, float]], size_bytes: int, rounds: int, case: str, starts_unseen: bool
) -> None:
    """Compare the messages and bytes that rank 0 and the last rank have sent, and what all ranks return."""
    each = rounds + 1 if len(counts) > 1 else 0
    for rank in (0, len(counts) - 1):
        sent, sent_bytes, _ = counts[rank]
        if sent == 0 and starts_unseen:
            continue
        if sent != each and sent == rounds and each:
            raise LawError("no_warm_up", f"{case}: rank {rank} sends {sent} messages, not {each}")
        if sent != each:
            raise LawError("rounds", f"{case}: rank {rank} sends {sent} messages, not {each}")
        if rank and sent_bytes != each * size_bytes:
            raise LawError("answer", f"{case}: rank {rank} sends {sent_bytes} bytes, not {each * size_bytes}")
        if sent_bytes != each * size_bytes:
            raise LawError("size", f"{case}: rank {rank} sends {sent_bytes} bytes, not {each * size_bytes}")
    if len({value for _, _, value in counts}) > 1:
        raise LawError("differ", f"{case}: the ranks return {', '.join(f'{value:.3g}' for _, _, value in counts)}")


def networks(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield networks, each with the share by which its times are off the line."""
    for noise in (0.0, 0.0, 0.2, 0.2):
        alpha, beta = 10 ** drawn.uniform(-7, -4), 10 ** drawn.uniform(-11, -8)
        yield {"alpha": alpha, "beta": beta, "noise": noise, "points": drawn.randrange(5, 12)}


def check_fit(trial: Trial) -> None:
    """Compare a fit with the line it was drawn from, or with the least squares of relative errors."""
    case = trial.case
    sizes = [float(int(10 ** (7 * place / case["points"]) * 8)) for place in range(case["points"])]
    line = [case["alpha"] + case["beta"] * size for size in sizes]
    times = [each * (1 + case["noise"] * trial.random.uniform(-1, 1)) for each in line]
    found = trial.student.fit(sizes, times)
    if not (isinstance(found, tuple | list | np.ndarray) and len(found) == 2):
        raise LawError("no_number", f"returns {type(found).__name__}, not (alpha, beta)")
    wanted = fit(sizes, times)
    got = float(found[0]), float(found[1])
    if alike(got, wanted):
        return
    raise LawError(fit_mistake(got, wanted, sizes, times), f"returns {got[0]:.4g}, {got[1]:.4g}")


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two lines are the same to FIT_ERROR."""
    return all(math.isclose(a, b, rel_tol=FIT_ERROR) for a, b in zip(one, other, strict=True))


def fit_mistake(got: tuple[float, float], wanted: tuple[float, float], sizes: list[float], times: list[float]) -> str:
    """Tell a known mistake from its result: key of the hint."""
    plain, by_root, by_square = (np.polyfit(sizes, times, 1, w=np.asarray(times) ** -power) for power in (0, 0.5, 2))
    columns = np.stack([1 / np.asarray(times), np.asarray(sizes) / times], axis=1)
    known: list[tuple[str, Any]] = [
        ("swapped", (wanted[1], wanted[0])),
        ("bandwidth", (wanted[0], 1 / wanted[1])),
        ("plain_squares", plain[::-1]),
        ("weights", by_root[::-1]),
        ("weights", by_square[::-1]),
        ("right_side", np.linalg.lstsq(columns, np.asarray(times), rcond=None)[0]),
    ]
    units = [1e3, 1e6, 1e9, 2.0**10, 2.0**20, 2.0**30, 8.0]
    scales = [1.0, *units, *(1 / unit for unit in units)]
    known += [("fit_unit", (wanted[0] * one, wanted[1] * other)) for one in scales for other in scales]
    return next((key for key, line in known if alike(got, line)), "not_least")


def rings(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield networks, ranks and sizes."""
    for ranks in (1, 2, 3, drawn.randrange(4, 500)):
        alpha, beta = 10 ** drawn.uniform(-7, -4), 10 ** drawn.uniform(-11, -8)
        yield {"alpha": alpha, "beta": beta, "ranks": ranks, "size_bytes": drawn.randrange(8, 1 << 30)}
    yield {"alpha": 1e-7, "beta": 1e-8, "ranks": 7, "size_bytes": 40}


def check_model(trial: Trial) -> None:
    """Compare the model of the ring with the formula."""
    case = trial.case
    found = trial.student.predict_allreduce(case["alpha"], case["beta"], case["ranks"], case["size_bytes"])
    wanted = predict_allreduce(**case)
    if isinstance(found, float | int) and math.isclose(found, wanted, rel_tol=CLOSE, abs_tol=1e-15):
        return
    raise LawError(model_mistake(found, case, wanted), f"returns {found!r}")


def model_mistake(found: Any, case: Mapping[str, Any], wanted: float) -> str:
    """Tell a known mistake from its result: key of the hint."""
    if not isinstance(found, float | int):
        return "no_number"
    alpha, beta, ranks, size = case["alpha"], case["beta"], case["ranks"], case["size_bytes"]
    known = {
        "half_a_ring": wanted / 2,
        "whole_arrays": 2 * (ranks - 1) * (alpha + beta * size),
        "hops": 2 * ranks * (alpha + beta * size / ranks),
        "one_latency": alpha + 2 * (ranks - 1) * beta * size / ranks,
        "no_latency": 2 * (ranks - 1) * beta * size / ranks,
        "rounded": 2 * (ranks - 1) * (alpha + beta * (size // ranks)),
    }
    return next((key for key, value in known.items() if math.isclose(found, value, rel_tol=CLOSE)), "not_a_ring")


def race(trial: Trial) -> Iterator[Row]:
    """Measure by the student's ping-pong and by ours, in turns."""
    comm = MPI.Intracomm(trial.comm)
    for size_bytes in SIZES_BYTES:
        both = trial.student.one_way, one_way
        pairs = [[float(function(comm, size_bytes, ROUNDS)) for function in both] for _ in range(PAIRS)]
        student, ours = map(float, np.median(pairs, axis=0))
        shared = trial.control.bcast((max(student, 1e-9), max(ours, 1e-9)))
        yield Row(f"{size_bytes} bytes", size_bytes, max(shared[0] / shared[1], shared[1] / shared[0]), 1.0)


LAB = Lab(
    number=1,
    name="latency",
    title="latency and bandwidth",
    functions=("one_way", "fit", "predict_allreduce"),
    laws=(
        Law("ping-pong", "rounds + 1 messages each way, the same number on all ranks", 15, messages, check_messages),
        Law("median", "half a round's time, the median of the rounds", 10, slow_rounds, check_median, ranks=(2, 4)),
        Law("fit", "the line with the least relative errors", 25, networks, check_fit, ranks=(1,)),
        Law("model", "the time of a ring sum, for any network", 20, rings, check_model, ranks=(1,)),
    ),
    races=(
        Race("agreement", "your times over ours, or ours over yours", 15, race, ((1.6, 1.0), (3.0, 0.5)), hint="clock",
             unit="ratio"),
    ),
    predictions=(
        Prediction("half", "bytes of which half the time is latency", 5, lambda _: ALPHA_S / BETA_S, within=1.05),
        Prediction("tree", "us of a binomial tree to 64 ranks", 5, lambda _: 6e6 * (ALPHA_S + 8 * BETA_S), within=1.05),
        Prediction("ring", "ms of a ring sum of 1 GB over 64 ranks", 5,
                   lambda _: 1e3 * predict_allreduce(ALPHA_S, BETA_S, 64, 10**9), within=1.05),
    ),
    hints={
        "no_number": "The function returns something else than its docstring says.",
        "no_warm_up": "The first message sets up the connection and says little: one more round has to come before.",
        "rounds": "A round is a message there and one back, between rank 0 and the last rank; other ranks send none.",
        "size": "The messages have another length than size_bytes: how many bytes does a value of your array have?",
        "differ": "The ranks return different numbers: share one of them.",
        "both_ways": "A round is two messages: the time of one is half of it, and of one round, not of all.",
        "unit": "The number is larger than the time that all rounds took: seconds are asked for, and of one message.",
        "swapped": "alpha and beta have changed places.",
        "bandwidth": "beta is seconds a byte; this is bytes a second.",
        "plain_squares": "Absolute errors of long messages hide those of short ones: divide each error by its time.",
        "half_a_ring": "A sum goes round twice: once to add, once to hand out.",
        "whole_arrays": "In each hop a rank sends a chunk, one p-th of the array, not all of it.",
        "hops": "A chunk has p - 1 hops in each half, not p: it starts on a rank that has it.",
        "one_latency": "Each of the hops waits for the one before, so each has its latency.",
        "not_least": "Another line has a smaller sum of ((alpha + beta b - t) / t) ** 2. The two columns are 1 / t and "
        "b / t, and the right side is 1 for each message.",
        "weights": "The errors are divided by something else than the times. The w of np.polyfit multiplies an error "
        "before it is squared, so it has to be 1 / t.",
        "right_side": "Both columns are divided by the times, but the right side is not: it is 1 for each message.",
        "fit_unit": "alpha is in seconds, beta in seconds a byte: a unit was changed on the way.",
        "no_latency": "Each of the hops has its latency, too.",
        "rounded": "A chunk has b / p bytes: it was rounded.",
        "not_a_ring": "2 (p - 1) hops follow one another, and each takes alpha + beta b / p.",
        "alone": "With one rank there is nobody to send to: return 0.0.",
        "answer": "The message back has another length than size_bytes: a round is size_bytes there and as many back.",
        "not_halved": "This is the time there and back: a message one way takes half of it.",
        "halved_twice": "The time of a round was halved twice: both where it is taken and at the end?",
        "all_rounds": "This is the time of all rounds together.",
        "mean": "This is the mean of the rounds. The median is asked for: one round that the system held up moves the "
        "mean, and says nothing about the network.",
        "extreme": "This is the shortest or the longest round. The median is asked for.",
        "warm_up": "The round that warms up is counted: leave out the first.",
        "part": "The clock has to run from before the message there is sent until the one back has come. One way alone "
        "cannot be timed: a send ends when its buffer is free, wherever the message is.",
        "barrier": "A barrier, or another wait for ranks that send nothing, lies between the two looks at the clock.",
        "clock": "Your times are far from ours: is anything between the two looks at the clock that is no message, "
        "such as making an array or a barrier, is it the median, and half of the way there and back?",
        "predicts_half": "Half the time is latency where beta b is alpha. How many bytes, not bits, do 10 GB/s move "
        "in 2 us?",
        "predicts_tree": "In each round of a tree every rank that has the value sends it on: how many have it after k "
        "rounds?",
        "predicts_ring": "How many hops are there with 64 ranks, each way round, and how long is a chunk? The unit is "
        "ms.",
        "forbidden": "A round is one Send and one Recv of an array on each of the two ranks, or Isend and Irecv. Calls "
        "in lower case pack an object, so the message is longer; Sendrecv is on its way in both directions at once.",
    },
    forbidden=("Sendrecv", "Dup", "Split", "send", "recv", "isend", "irecv", "sendrecv"),
)  # fmt: skip
