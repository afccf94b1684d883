"""Checks of lab 1: a ping-pong whose times are known, a fit of known lines, formulas beside those of the planner.

ping_pong   round_trips.py: each send sleeps for a time that is drawn; what is returned has to hold it
fit         fits.py: times made from alpha and beta, disturbed as they are on a machine; both have to come back
formulas    collectives/cost.py with nothing but alpha and beta
race        a ring of four ranks predicted from the student's measurements and from ours, then run
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.collectives import allreduce
from hpcllm.collectives.cost import cost_s
from hpcllm.collectives.tuning import Coding, Link, Rates, Shape
from hpcllm.course.lab import RANKS, Lab, Law, LawError, Prediction, Race, Row, Trial
from hpcllm.course.labs.latency import fits, round_trips
from hpcllm.course.labs.latency.fits import near
from hpcllm.perf.timing import Case, in_turns

FORMULA_SHARE = 1e-6
FASTEST = math.inf  # GB/s of all that is no message
ALPHA_S, BETA_S = 2e-6, 1 / 12.5e9  # of the questions
FIT_BYTES = (1 << 8, 1 << 12, 1 << 16, 1 << 19, 1 << 22)
RING_BYTES = (1 << 16, 1 << 20, 1 << 22)
TURNS, TRIPS, ROUNDS = 3, 7, 21
WORST = 1e6  # times that a prediction is off
PAUSE_S = 0.0005

Mistakes = tuple[tuple[str, Callable[..., float]], ...]  # key of a hint, the wrong formula


# ---- ours


def ping_pong(comm: MPI.Intracomm, size_bytes: int, repeats: int) -> list[float]:
    """Time messages between ranks 0 and 1."""
    data, seconds = np.zeros(size_bytes, np.uint8), []
    for _ in range(repeats + 1 if comm.rank < 2 else 0):
        start_s = time.perf_counter()
        if comm.rank == 0:
            comm.Send(data, dest=1)
        comm.Recv(data, source=1 - comm.rank)
        if comm.rank == 1:
            comm.Send(data, dest=0)
        seconds.append((time.perf_counter() - start_s) / 2)
    return seconds[1:] if comm.rank == 0 else []


def fit(sizes_bytes: Sequence[int], seconds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit a line to the medians, each error as a share of its time."""
    sizes, times = np.array(sizes_bytes, float), np.median(seconds, axis=1)
    found = np.linalg.lstsq(np.stack([1 / times, sizes / times], axis=1), np.ones(len(sizes)), rcond=None)[0]
    return float(found[0]), float(found[1])


def fit_least(sizes_bytes: Sequence[int], seconds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit a line to the least times likewise."""
    return fit(sizes_bytes, [[min(repeats)] for repeats in seconds])


def model_s(algorithm: str, ranks: int, size_bytes: float, alpha_s: float, beta_s: float) -> float:
    """Predict an allreduce as the planner does, with nothing but messages."""
    link, raw = Link(alpha_s, 1e-9 / beta_s), Coding("raw", 1.0, FASTEST, FASTEST, FASTEST)
    rates = Rates(link, link, link, 0.0, 0.0, 0.0, FASTEST, FASTEST)
    return cost_s("allreduce", algorithm, size_bytes, raw, Shape(ranks), rates)


def crossover_bytes(ranks: int, alpha_s: float, beta_s: float) -> float:
    """Solve ring = doubling for the size: both are lines in it, which two points give."""
    ring, doubling = (
        [model_s(name, ranks, size, alpha_s, beta_s) for size in (1.0, 1e12)] for name in ("ring", "recursive_doubling")
    )
    slope = (doubling[1] - doubling[0] - ring[1] + ring[0]) / (1e12 - 1.0)
    if slope <= FORMULA_SHARE * beta_s:
        return math.inf
    return 1.0 + (ring[0] - doubling[0]) / slope


REFERENCE = SimpleNamespace(
    ping_pong=ping_pong,
    fit=fit,
    ring_s=partial(model_s, "ring"),
    doubling_s=partial(model_s, "recursive_doubling"),
    crossover_bytes=crossover_bytes,
)


# ---- the formulas


def links(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield links and jobs: 1 to 4 ranks, then powers of two and other numbers."""
    for ranks in (2, 1, 4, 3, 8, drawn.choice([5, 6, 7, 12]), drawn.randrange(33, 1000)):
        size = float(drawn.randrange(1, 10**6) * ranks)
        yield {
            "p": ranks,
            "bytes": size,
            "alpha_s": 10 ** drawn.uniform(-6, -4),
            "beta_s": 10 ** drawn.uniform(-11, -9),
        }


def pairs(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield the same jobs of 2 ranks or more."""
    yield from ({**case, "bytes": 0.0} for case in links(drawn, ranks) if case["p"] > 1)


def check_formula(trial: Trial, name: str, mistakes: Mistakes) -> None:
    """Compare a formula with that of the planner."""
    arguments = tuple(trial.case[key] for key in ("p", "bytes", "alpha_s", "beta_s"))
    found, wanted = number(getattr(trial.student, name)(*arguments), name), getattr(REFERENCE, name)(*arguments)
    if near(found, wanted, FORMULA_SHARE):
        return
    known = (key for key, mistake in mistakes if near(found, mistake(*arguments), FORMULA_SHARE))
    default = "one_rank" if trial.case["p"] == 1 else "terms"
    raise LawError(default if default == "one_rank" else next(known, default), f"{name} gives {found:.6g} s")


def number(found: Any, name: str) -> float:
    """Return what a function found if it is a number. Raises LawError."""
    if not isinstance(found, Real):
        raise LawError("number", f"{name} gives {found!r:.60}")
    return float(found)


RING_MISTAKES: Mistakes = (
    ("one_half", lambda p, b, alpha, beta: (p - 1) * (alpha + beta * b / p)),
    ("whole", lambda p, b, alpha, beta: 2 * (p - 1) * (alpha + beta * b)),
    ("one_alpha", lambda p, b, alpha, beta: alpha + 2 * (p - 1) * beta * b / p),
    ("steps", lambda p, b, alpha, beta: 2 * p * (alpha + beta * b / p)),
)
DOUBLING_MISTAKES: Mistakes = (
    ("log", lambda p, b, alpha, beta: math.log2(p) * (alpha + beta * b)),
    ("others", lambda p, b, alpha, beta: math.floor(math.log2(p)) * (alpha + beta * b)),
    ("others", lambda p, b, alpha, beta: math.ceil(math.log2(p)) * (alpha + beta * b)),
    ("one_alpha", lambda p, b, alpha, beta: alpha + math.log2(p) * beta * b),
    ("halves", lambda p, b, alpha, beta: math.log2(p) * alpha + 2 * (p - 1) / p * beta * b),
    ("steps", lambda p, b, alpha, beta: (p - 1) * (alpha + beta * b)),
)


def check_crossover(trial: Trial) -> None:
    """Compare the size at which both take equally long."""
    arguments = trial.case["p"], trial.case["alpha_s"], trial.case["beta_s"]
    found, wanted = number(trial.student.crossover_bytes(*arguments), "crossover_bytes"), crossover_bytes(*arguments)
    if found == wanted or (found > 0 and near(wanted, found, FORMULA_SHARE)):
        return
    if math.isinf(wanted) or not 0 < found < math.inf:
        raise LawError("never", f"crossover_bytes gives {found:.6g} bytes")
    factor = "unit_of_size" if any(near(found * unit, wanted, FORMULA_SHARE) for unit in (4, 1e3, 1e6)) else "equal"
    raise LawError(factor, f"crossover_bytes gives {found:.6g} bytes, where the ring takes "
                   f"{model_s('ring', arguments[0], found, *arguments[1:]):.4g} s, doubling "
                   f"{model_s('recursive_doubling', arguments[0], found, *arguments[1:]):.4g} s")  # fmt: skip


# ---- this machine


def race(trial: Trial) -> Iterator[Row]:
    """Predict our ring by the student's fit and by ours, then run it: how many times each is off.

    Ours is the worse of two good ones, by the median of each size and by the least: on a busy machine they differ.
    """
    comm = MPI.Intracomm(trial.comm)
    seconds = _measured_s(trial, comm)
    lines = [_line_of(trial.control, fitted, seconds) for fitted in (trial.student.fit, fit, fit_least)]
    for size_bytes in RING_BYTES:
        x = np.zeros(size_bytes // 4, np.float32)
        case = Case(partial(allreduce, x, comm, algorithm="ring"))
        measured_s = in_turns(trial.control, [case], ROUNDS, 3, lambda: False)[0].median
        student = times_off(trial.student.ring_s(RANKS, size_bytes, *lines[0]), measured_s)
        ours = max(times_off(model_s("ring", RANKS, size_bytes, *line), measured_s) for line in lines[1:])
        yield Row(f"{size_bytes} bytes", size_bytes, student, ours, bound=1.0)


def _measured_s(trial: Trial, comm: MPI.Intracomm) -> list[list[float]]:
    """Measure messages of each size by the student's function and by ours, in turns; of both together, on rank 0."""
    found: list[list[float]] = [[] for _ in FIT_BYTES]
    for _ in range(TURNS):
        for place, size_bytes in enumerate(FIT_BYTES):
            for function in (trial.student.ping_pong, ping_pong):
                rest(trial.control)
                found[place] += function(comm, size_bytes, TRIPS)
    rest(trial.control)
    return found


def _line_of(control: MPI.Intracomm, fitted: Callable[..., Any], seconds: list[list[float]]) -> tuple[float, float]:
    """Fit on rank 0, for all."""
    line = tuple(map(float, fitted(list(FIT_BYTES), seconds))) if control.rank == 0 else None
    alpha_s, beta_s = control.bcast(line)
    return alpha_s, beta_s


def rest(control: MPI.Intracomm) -> None:
    """Return when all ranks are here; who waits leaves the core to those that measure."""
    barrier = control.Ibarrier()
    while not barrier.Test():
        time.sleep(PAUSE_S)


def times_off(predicted_s: float, measured_s: float) -> float:
    if not 0 < predicted_s < math.inf:
        return WORST
    return min(WORST, max(predicted_s / measured_s, measured_s / predicted_s))


LAB = Lab(
    number=1,
    name="latency",
    title="latency and bandwidth",
    functions=("ping_pong", "fit", "ring_s", "doubling_s", "crossover_bytes"),
    laws=(
        Law("ping-pong", "ping_pong returns the times of messages, each", 20,
            round_trips.messages, round_trips.check_ping_pong, (2, 3, RANKS)),
        Law("clock", "ping_pong is right when the time of day is set", 5,
            round_trips.one_message, round_trips.check_clock, (2,)),
        Law("fit", "fit finds alpha and beta behind disturbed times", 20, fits.lines, fits.check_fit, (1,)),
        Law("ring", "ring_s gives what our planner does", 10, links,
            partial(check_formula, name="ring_s", mistakes=RING_MISTAKES), (1,)),
        Law("doubling", "doubling_s gives what our planner does", 10, links,
            partial(check_formula, name="doubling_s", mistakes=DOUBLING_MISTAKES), (1,)),
        Law("crossover", "at crossover_bytes both take equally long", 10, pairs, check_crossover, (1,)),
    ),
    races=(
        Race("a ring, predicted", "how many times your prediction is off, beside ours", 10, race,
             ((2.0, 1.0), (4.0, 0.5)), hint="prediction", unit="times off"),
    ),
    predictions=(
        Prediction("half_kb", "1000 bytes of a message that gets half of the bandwidth", 5,
                   lambda _: ALPHA_S / BETA_S / 1e3, 1.01),
        Prediction("ring_ms", "milliseconds of a ring over 64 ranks of 1e9 bytes", 5,
                   lambda _: 1e3 * model_s("ring", 64, 1e9, ALPHA_S, BETA_S), 1.01),
        Prediction("crossover_kb", "1000 bytes from which on a ring is faster on 16 ranks", 5,
                   lambda _: crossover_bytes(16, ALPHA_S, BETA_S) / 1e3, 1.01),
    ),
    hints={
        **round_trips.HINTS,
        **fits.HINTS,
        "forbidden": "This call is not watched here, or turns objects into bytes, which takes time of its own: use "
        "Send, Isend, Recv, Irecv and Sendrecv.",
        "number": "The function returns one number, in seconds or in bytes; is there a return?",
        "one_rank": "One rank sends nothing: 0 seconds.",
        "one_half": "A ring goes round twice: p - 1 steps to add up, and p - 1 to hand out the sums.",
        "whole": "A step carries a chunk, size_bytes / p, not all of x.",
        "one_alpha": "Every step begins after the one before: each costs an alpha.",
        "steps": "Count the steps on paper for 4 ranks.",
        "log": "log2 of 3 ranks is no number of steps: 2^k of them exchange in k steps, k whole; and the others?",
        "others": "Where p is no power of two, ranks beyond 2^k hand in x before, and get it back after: two messages "
        "more than k, one after another.",
        "halves": "In recursive doubling each step carries all of x; halves travel in Rabenseifner's algorithm.",
        "terms": "Write the formula down for 2 ranks, then for 4: how many messages one after another, of which size?",
        "never": "On some numbers of ranks the ring is never faster, and the size is math.inf; compare the factors of "
        "beta b first.",
        "equal": "At this size they do not take equally long. Set ring_s = doubling_s and solve for the size.",
        "unit_of_size": "The size is in bytes.",
        "prediction": "Your prediction is further off than ours from the same links. Print alpha_s and beta_s that fit "
        "finds here: is alpha microseconds, and 1 / beta some GB/s?",
    },
    forbidden=(
        *("send", "isend", "recv", "irecv", "sendrecv", "ssend", "issend", "bsend", "ibsend", "Recv_init"),
        *("Bsend", "Ibsend", "Rsend", "Irsend", "Sendrecv_replace", "Isendrecv", "Send_init", "Ssend_init"),
    ),
)  # fmt: skip
