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
from typing import Any, NamedTuple

from hpcllm.course.lab import LawError, Trial

WARM_UP_S = 0.002  # that the last rank needs in the first round
LATE_S = (0.005, 0.012, 0.045, 0.075, 0.230)  # in the others, in an order of their own
FIRST_SHARE = 0.35  # of it before the last rank receives
NEAR = 0.12  # relative
SPARE_S = 0.001
BARRIER_S = 0.06  # that a rank without messages comes late to a collective
SIZE_BYTES = 1 << 20
Calls = list[tuple[str, float, float]]  # name, begin, end


class Round(NamedTuple):
    """Seconds of a round, of its send, and of a barrier just before it."""

    whole_s: float
    send_s: float
    barrier_s: float


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
        rounds = rounds_of(calls, end_s)
        if not rounds:  # persistent requests are not seen here
            return
        hint = mistake(float(found), rounds) if len(rounds) == len(late_s) else "rounds"
        if hint:
            each = ", ".join(f"{1e3 * seconds:.1f}" for seconds in (each.whole_s for each in rounds))
            said = f"rounds of {each} ms there and back, the first to warm up"
            raise LawError(hint, f"{comm.size} ranks: {1e3 * found:.1f} ms, of {said}")


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


def rounds_of(calls: Calls, end_s: float) -> list[Round]:
    """Return the rounds: each is from its send to the end of its receive, or to the next call."""
    sends = [place for place, (name, _, _) in enumerate(calls) if name.lower().endswith("send")]
    found = []
    for place in sends:
        _, begin_s, sent_s = calls[place]
        after = [call for call in calls[place + 1 :] if call[0] != "Irecv"] + [("", end_s, end_s)]
        over_s = after[0][2] if after[0][0] == "Recv" else after[0][1]
        before, barrier_s, barrier_end_s = calls[place - 1] if place else ("", 0.0, 0.0)
        found.append(Round(over_s - begin_s, sent_s - begin_s, (barrier_end_s - barrier_s) * (before == "Barrier")))
    return found


def mistake(found_s: float, rounds: Sequence[Round]) -> str:
    """Return the key of the hint, '' if it is half the median."""
    right_s = statistics.median(each.whole_s for each in rounds[1:]) / 2
    if abs(found_s - right_s) <= NEAR * right_s + SPARE_S:
        return ""
    off = {known: abs(found_s - known[1]) / max(known[1], SPARE_S) for known in mistakes(rounds, right_s)}
    nearest = min(off, key=lambda known: off[known])
    return nearest[0] if off[nearest] <= NEAR else "clock"


def mistakes(rounds: Sequence[Round], right_s: float) -> Iterator[tuple[str, float]]:
    """Yield what known mistakes return: key of the hint, seconds."""
    median, every_s = statistics.median, [each.whole_s for each in rounds]
    counted_s = every_s[1:]
    yield from (("not_halved", 2 * right_s), ("halved_twice", right_s / 2))
    yield from (("warm_up", seconds / 2) for seconds in (median(every_s), statistics.mean(every_s)))
    yield "warm_up", sorted(every_s)[len(counted_s) // 2] / 2
    yield from (("mean", sum(times_s) / len(counted_s) / 2) for times_s in (counted_s, every_s))
    yield "mean", statistics.mean(counted_s)
    yield from (("extreme", extreme(counted_s) / halves) for extreme in (min, max) for halves in (1, 2))
    yield from (("all_rounds", sum(counted_s) / halves) for halves in (1, 2))
    for part_s in ([each.send_s for each in rounds[1:]], [each.whole_s - each.send_s for each in rounds[1:]]):
        yield from (("part", median(part_s) / halves) for halves in (1, 2))
    yield from (("unit", right_s * unit) for unit in (1e3, 1e6, 1e9))
    with_barrier_s = [each.whole_s + each.barrier_s for each in rounds[1:]]
    yield from (("barrier", median(with_barrier_s) / halves) for halves in (1, 2))
