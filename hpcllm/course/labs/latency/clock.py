"""A law of lab 1: which number of the rounds `one_way` returns, told from rounds that are made to last.

rank 0   |Send ---.         .--> Recv|        |Send --- ...
last rank          sleeps, Recv, sleeps, Send          sleeps longer ...
                                              ^ a rank that sends nothing sleeps, too: a barrier waits for it

The grader sees on rank 0 when each round begins and ends. Median, mean, all of the way, half of it ... are far from one
another then, on a machine of any load, and what comes back is compared with each.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpcllm.course.lab import LawError, Trial

WARM_UP_S = 0.002  # that the last rank needs in the first round
LATE_S = (0.005, 0.012, 0.045, 0.075, 0.230)  # in the others, in an order of their own
FIRST_SHARE = 0.35  # of it before the last rank receives
NEAR = 0.12  # relative
SPARE_S = 0.001
BARRIER_S = 0.06  # that a rank without messages comes late to a collective
SIZE_BYTES = 1 << 16
Calls = list[tuple[str, float, float]]  # name, begin, end


def slow_rounds(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield an order of the rounds' delays."""
    yield {"late_s": [WARM_UP_S, *drawn.sample(LATE_S, len(LATE_S))]}


def check_median(trial: Trial) -> None:
    """Compare what comes back with half the median of the rounds, as rank 0 saw them."""
    comm, late_s, calls = trial.comm, trial.case["late_s"], Calls()
    if comm.rank == 0:
        keep_times(comm, calls)
    elif comm.rank == comm.size - 1:
        make_late(comm, late_s)
    else:
        come_late(comm)
    found = trial.student.one_way(comm, SIZE_BYTES, len(late_s) - 1)
    end_s = time.perf_counter()
    if comm.rank == 0:
        rounds_s, sends_s = rounds_of(calls, end_s)
        hint = mistake(float(found), rounds_s, sends_s) if len(rounds_s) == len(late_s) else "rounds"
        if hint:
            each = ", ".join(f"{1e3 * seconds:.1f}" for seconds in rounds_s)
            rounds = f"rounds of {each} ms there and back, the first to warm up"
            raise LawError(hint, f"{comm.size} ranks: {1e3 * found:.1f} ms, of {rounds}")


def keep_times(comm: Any, calls: Calls) -> None:
    """Write down when this rank's calls begin and end."""

    def timed(name: str) -> Callable[..., Any]:
        method = getattr(comm, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                calls.append((name, begin_s, time.perf_counter()))

        return call

    for name in ("Send", "Ssend", "Isend", "Issend", "Recv", "Irecv", "Barrier", "bcast", "Bcast", "allgather"):
        setattr(comm, name, timed(name))


def make_late(comm: Any, late_s: Sequence[float]) -> None:
    """Let the answers of this rank be late: a part of it before it receives."""

    def after_sleep(names: Sequence[str], share: float) -> None:
        left = iter(late_s)
        for name in names:
            setattr(comm, name, _after(getattr(comm, name), lambda: next(left, 0.0) * share))

    after_sleep(("Recv", "Irecv"), FIRST_SHARE)
    after_sleep(("Send", "Ssend", "Isend", "Issend"), 1 - FIRST_SHARE)


def come_late(comm: Any) -> None:
    """Let this rank, which has nothing to send, come late to barriers."""
    comm.Barrier = _after(comm.Barrier, lambda: BARRIER_S)


def _after(method: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds())
        return method(*arguments, **keywords)

    return call


def rounds_of(calls: Calls, end_s: float) -> tuple[list[float], list[float]]:
    """Return the seconds of each round, and of each send: a round is from its send to its receive, or the next call."""
    sends = [place for place, (name, _, _) in enumerate(calls) if name.lower().endswith("send")]
    rounds_s = []
    for place, following in zip(sends, [*sends[1:], len(calls)], strict=True):
        _, begin_s, over_s = calls[place]
        for name, next_begin_s, next_end_s in [*calls[place + 1 : following + 1], ("", end_s, end_s)]:
            if name == "Irecv":
                continue
            over_s = next_end_s if name == "Recv" else next_begin_s
            break
        rounds_s.append(over_s - begin_s)
    return rounds_s, [calls[place][2] - calls[place][1] for place in sends]


def mistake(found_s: float, rounds_s: Sequence[float], sends_s: Sequence[float]) -> str:
    """Return the key of the hint, '' if it is half the median."""
    counted, median = rounds_s[1:], statistics.median
    right_s = median(counted) / 2
    if abs(found_s - right_s) <= NEAR * right_s + SPARE_S:
        return ""
    answers_s = [whole - send for whole, send in zip(rounds_s, sends_s, strict=True)]
    known = [("not_halved", 2 * right_s), ("halved_twice", right_s / 2), ("warm_up", median(rounds_s) / 2)]
    known += [("warm_up", sorted(rounds_s)[len(counted) // 2] / 2), ("mean", statistics.mean(counted) / 2)]
    known += [("mean", statistics.mean(counted)), ("mean", sum(rounds_s) / len(counted) / 2)]
    known += [
        ("warm_up", statistics.mean(rounds_s) / 2),
        ("all_rounds", sum(counted)),
        ("all_rounds", sum(counted) / 2),
    ]
    known += [("extreme", extreme(counted) / 2) for extreme in (min, max)]
    known += [("part", median(part[1:]) / halves) for part in (sends_s, answers_s) for halves in (1, 2)]
    known += [("unit", right_s * unit) for unit in (1e3, 1e6, 1e9)]
    known += [("barrier", median(counted) / 2 + BARRIER_S / 2), ("barrier", median(counted) + BARRIER_S)]
    off = {key_value: abs(found_s - key_value[1]) / max(key_value[1], SPARE_S) for key_value in known}
    nearest = min(off, key=lambda key_value: off[key_value])
    return nearest[0] if off[nearest] <= NEAR else "clock"
