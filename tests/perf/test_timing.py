"""Start together, take turns, the slowest rank counts, all stop at the same place."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hpcllm.perf.timing import Case, Seconds, in_turns, meet

NAP_S = 0.03


def nothing() -> None:
    pass


def never() -> bool:
    return False


@pytest.mark.parallel([1, 2, 3])
def test_the_slowest_rank_counts_on_all_ranks_and_preparing_does_not(comm):
    last = comm.rank == comm.size - 1
    slow = Case((lambda: time.sleep(NAP_S)) if last else nothing)
    quick = Case(nothing, (lambda: time.sleep(NAP_S)) if last else nothing)
    timed = in_turns(comm, [slow, quick], 5, 1, never)
    assert timed[0].samples.min() >= NAP_S
    assert timed[1].median < NAP_S / 2
    everywhere = comm.allgather([row.samples.tolist() for row in timed])
    assert all(row == everywhere[0] for row in everywhere)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(("rounds", "warmup"), [(1, 0), (3, 2), (4, 0)])
def test_cases_take_turns_each_with_fresh_data(comm, rounds, warmup):
    log: list[str] = []
    cases = [Case(lambda n=name: log.append(n), lambda n=name: log.append(n.lower())) for name in "ABC"]
    timed = in_turns(comm, cases, rounds, warmup, never)
    assert "".join(log) == "aAbBcC" * (rounds + warmup)
    assert [row.samples.size for row in timed] == [rounds] * 3


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(("after", "left"), [(0, 0), (1, 0), (3, 1), (5, 3)])
def test_when_one_rank_is_asked_to_stop_all_stop_with_what_they_have(comm, after, left):
    ran = []
    cases = [Case(lambda: ran.append(1)), Case(nothing)]
    asked = lambda: comm.rank == comm.size - 1 and len(ran) >= after  # noqa: E731
    timed = in_turns(comm, cases, 50, 2, asked)
    assert len(set(comm.allgather(len(ran)))) == 1
    assert len(ran) < 10
    assert [row.samples.size for row in timed] in ([], [len(ran) - 2] * 2)
    assert bool(timed) == bool(len(ran) > 2)
    assert left == 0 or timed


@pytest.mark.parallel([2, 3])
def test_nobody_leaves_a_meeting_before_all_have_come(comm):
    comm.Barrier()
    start = time.perf_counter()
    if comm.rank == 1:
        time.sleep(NAP_S)
    assert meet(comm, comm.rank == 1)
    assert time.perf_counter() - start >= 0.9 * NAP_S


def test_a_summary_is_of_the_samples():
    samples = np.array([4.0, 1.0, 3.0, 2.0, 10.0])
    row = Seconds(samples).summary()
    assert (row["median_s"], row["min_s"], row["max_s"], row["iterations"]) == (3.0, 1.0, 10.0, 5)
    assert row["spread"] == pytest.approx((4 - 2) / 3)
    assert Seconds(samples).each(2).median == 1.5
