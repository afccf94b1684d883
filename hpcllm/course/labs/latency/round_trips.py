"""Checks of a ping-pong whose times are known from below and from above.

Each send of ranks 0 and 1 sleeps before it, for a time that the check draws and the student cannot know:

    rank 0   b|sleep| send .. .. .. .. .. .. receive       2 x what is returned  >=  l - b, trip by trip
    rank 1           receive .. |sleep|l send              all of them together  <=  the time that they took

b: the send is called; l: the answer leaves, after all that has held up both before. Both bounds hold on any machine,
however busy; what is outside tells by how much which mistake it is. Between computers, whose clocks do not agree, l - b
is the two sleeps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.course.lab import LawError, Trial

SENDS = ("Send", "Ssend", "Isend", "Issend", "Sendrecv")
RECEIVES = ("Recv", "Irecv")
SLEEP_S = (5e-3, 9e-3)  # before a send; before the first of a rank, as a connection is made, FIRST_S
FIRST_S = 20e-3
REPEATS = 8  # all of them together take longer than the first round trip
CLOCK_SHARE = 1e-3  # by which a sleep may be shorter than asked for
SET_BACK_S = 3600.0
HINTS = {
    "shape": "Rank 0 returns a list with a number for each timed round trip, the other ranks an empty list.",
    "third": "Only ranks 0 and 1 send; the others return an empty list at once.",
    "size": "A message has to have exactly size_bytes bytes: an array of float64 has 8 for each element; np.uint8 "
    "has 1.",
    "trips": "For each message of rank 0 there is one answer of rank 1; `repeats` + 1 round trips are enough.",
    "exchange": "Rank 1 sends before it has received: both messages are under way at once, and half of the time of "
    "that is no message's. Rank 1 has to receive first, and then answer.",
    "warm_up": "The first round trip is among the times: connections are made in it. Make one more than `repeats`, "
    "and leave out the first.",
    "cpu_time": "This clock does not run while the process waits. Take one that does: time.perf_counter().",
    "each": "All times are equal, as no measured times are: read the clock before and after every round trip.",
    "span": "Part of the round trip is not in the time: read the clock before the send, and again when the answer "
    "is there; a send alone says nothing, it may come back before anything has been sent. Half of that is one way.",
    "unit": "Times are in seconds.",
    "restart": "The times grow from one to the next: the clock has to be read anew before each round trip.",
    "half": "This is the time there and back; a message takes half of it.",
    "clock": "time.time() is the time of day, which is set now and then, back too. For durations there is "
    "time.perf_counter(), which only goes forward.",
}


@dataclass
class Log:
    """Calls of a rank as they begin, and how long each send slept. Plain data, to be gathered."""

    calls: list[str] = field(default_factory=list)
    sleeps_s: list[float] = field(default_factory=list)
    begun_s: list[float] = field(default_factory=list)  # when each send was called
    left_s: list[float] = field(default_factory=list)  # when its sleep was over
    computer: str = field(default_factory=MPI.Get_processor_name)


def slowed(trial: Trial) -> Log:
    """Let each send of the communicator sleep first, and write down what is called."""
    log, drawn = Log(), random.Random(f"{trial.random.random()}/{trial.comm.rank}")
    for name in SENDS + RECEIVES:
        setattr(trial.comm, name, _logged(name, getattr(trial.comm, name), log, drawn))
    return log


def _logged(name: str, call: Callable[..., Any], log: Log, drawn: random.Random) -> Callable[..., Any]:
    def method(*arguments: Any, **keywords: Any) -> Any:
        log.calls.append(name)
        if name in SENDS:
            log.begun_s.append(time.perf_counter())
            log.sleeps_s.append(drawn.uniform(*SLEEP_S) if log.sleeps_s else FIRST_S)
            time.sleep(log.sleeps_s[-1])
            log.left_s.append(time.perf_counter())
        return call(*arguments, **keywords)

    return method


def messages(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield sizes of a ping-pong: one byte, none, more than MPI sends without waiting for the receiver."""
    yield from ({"size_bytes": size, "repeats": REPEATS} for size in (1, 0))
    yield {"size_bytes": drawn.randrange(100_000, 1_000_000), "repeats": REPEATS + ranks}


def one_message(_: random.Random, __: int) -> Iterator[Mapping[str, Any]]:
    """Yield one size."""
    yield {"size_bytes": 8, "repeats": REPEATS}


def check_ping_pong(trial: Trial) -> None:
    """Compare the times that rank 0 returns with the sleeps in them, and with the whole call."""
    _check_slowed(trial, slowed(trial))


def _check_slowed(trial: Trial, log: Log) -> None:
    found = trial.student.ping_pong(trial.comm, trial.case["size_bytes"], trial.case["repeats"])
    end_s = time.perf_counter()
    _check_messages(trial, log)
    logs = trial.control.gather(log)
    if logs is None:
        if not (isinstance(found, Sequence) and len(found) == 0):
            raise LawError("shape", f"rank {trial.comm.rank} returns {found!r:.60}, not an empty list")
        return
    seconds = _times(found, trial.case["repeats"])
    _check_trips(logs, trial.case["repeats"])
    _check_times(seconds, logs, end_s)


def _check_messages(trial: Trial, log: Log) -> None:
    """Hold this rank's messages to their number and size."""
    rank, size_bytes = trial.comm.rank, trial.case["size_bytes"]
    if rank > 1 and trial.comm.messages:
        raise LawError("third", f"rank {rank} sends {trial.comm.messages} messages")
    if trial.comm.sent_bytes != trial.comm.messages * size_bytes:
        mean = trial.comm.sent_bytes / trial.comm.messages
        raise LawError("size", f"rank {rank} sends messages of {mean:.0f} bytes, not {size_bytes}")
    if rank == 1 and ("Sendrecv" in log.calls or (log.calls[:1] and log.calls[0] in SENDS)):
        raise LawError("exchange", "rank 1 sends before it has received")


def _times(found: Any, repeats: int) -> list[float]:
    """Return the times if they are so many numbers."""
    numbers = list(found) if isinstance(found, Sequence | np.ndarray) and np.ndim(found) == 1 else []
    if len(numbers) != repeats or not all(isinstance(s, Real) and math.isfinite(s) for s in numbers):
        raise LawError("shape", f"rank 0 returns {found!r:.60}, not a list of {repeats} numbers")
    return [float(number) for number in numbers]


def _check_trips(logs: Sequence[Log], repeats: int) -> None:
    sent, answered = len(logs[0].begun_s), len(logs[1].begun_s)
    if sent != answered:
        raise LawError("trips", f"rank 0 sends {sent} messages, rank 1 answers {answered}")
    if sent <= repeats:
        hint = "warm_up" if sent == repeats else "trips"
        raise LawError(hint, f"{sent} round trips for {repeats} times, of which none is to be the first")


def _check_times(seconds: Sequence[float], logs: Sequence[Log], end_s: float) -> None:
    """Hold each time to its round trip, and all to the call from the last one not timed on."""
    if len(set(seconds)) == 1:  # no clock of nanoseconds gives milliseconds that are all equal
        raise LawError("each", f"all {len(seconds)} times are {seconds[0]:.6g} s")
    trips_s = least_trips_s(*logs[:2])
    least_s = trips_s[-len(seconds) :]
    for number, (found_s, trip_s) in enumerate(zip(seconds, least_s, strict=True)):
        if 2 * found_s < trip_s * (1 - CLOCK_SHARE):
            shown = f"time {number} is {found_s:.3g} s, and the round trip took {trip_s:.3g} s at least"
            raise LawError(too_short(seconds, trips_s), shown)
    whole_s = end_s - logs[0].begun_s[-len(seconds) - 1]
    if 2 * sum(seconds) > whole_s:
        shown = f"{len(seconds)} times add up to {sum(seconds):.3g} s for one way, and both took {whole_s:.3g} s"
        raise LawError(too_long(seconds, least_s), shown)


def least_trips_s(first: Log, second: Log) -> list[float]:
    """Return the least seconds of each round trip: until the answer left, or its sleeps."""
    if first.computer == second.computer:
        return [left - begun for begun, left in zip(first.begun_s, second.left_s, strict=True)]
    return [sum(pair) for pair in zip(first.sleeps_s, second.sleeps_s, strict=True)]


def too_short(seconds: Sequence[float], trips_s: Sequence[float]) -> str:
    """Tell a known mistake from times that are too short: key of the hint."""
    least_s = trips_s[-len(seconds) :]
    if min(seconds) < 0:
        return "clock"
    if all(8 * found < trip for found, trip in zip(seconds, least_s, strict=True)):
        return "cpu_time"
    if all(2 * found > trip * (1 - CLOCK_SHARE) for found, trip in zip(seconds, trips_s, strict=False)):
        return "warm_up"
    return "span"


def too_long(seconds: Sequence[float], least_s: Sequence[float]) -> str:
    """Tell a known mistake from times that are too long: key of the hint."""
    if sum(seconds) > 100 * sum(least_s):
        return "unit"
    return "restart" if list(seconds) == sorted(seconds) else "half"


def check_clock(trial: Trial) -> None:
    """Measure while the time of day is set back, as a computer of a cluster does now and then."""
    real, log = time.time, slowed(trial)
    time.time = lambda: real() - SET_BACK_S * (len(log.begun_s) > REPEATS // 2)
    try:
        _check_slowed(trial, log)
    except LawError as wrong:
        raise LawError("clock", wrong.shown) from wrong
    finally:
        time.time = real
