"""Diagnoses of labs 1, 2 and 6: without a fault they make what is right, and faults are told from one another."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from hpcllm.course.labs.allreduce.mistakes import RINGS, Half, added, mistake, replaced, ring, small_mistake
from hpcllm.course.labs.latency import clock
from hpcllm.course.labs.zero.adamw import RIGHT, draw, faulty
from hpcllm.course.labs.zero.checks import NEAR
from hpcllm.course.labs.zero.formula import FAULTS, run


def addends(ranks: int, n: int) -> np.ndarray:
    return np.random.default_rng(ranks).integers(1, 1000, (ranks, n)).astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_ring_without_a_fault_sums(ranks):
    parts = addends(ranks, 2 * ranks)
    found = ring(parts, Half(0, added), Half(1, replaced))
    assert np.array_equal(found, np.broadcast_to(parts.sum(0), found.shape))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("key", list(RINGS))
def test_each_fault_of_a_ring_is_named_on_some_rank_and_misnamed_on_none(key, ranks):
    parts = addends(ranks, ranks)
    for halves in RINGS[key]:
        found = ring(parts, *halves)
        wrong = [rank for rank in range(ranks) if not np.array_equal(found[rank], parts.sum(0))]
        assert wrong or key == "first_hops"  # one hop more is overwritten by the second half
        assert all(mistake(found[rank], parts[rank], parts, rank) in (key, "nothing") for rank in wrong)


def test_small_sums_have_hints_of_their_own():
    parts = addends(3, 5)
    assert small_mistake(parts[0] + parts[1], parts[0], parts) == "small_incomplete"
    assert small_mistake(parts.sum(0) + parts[1], parts[0], parts) == "small_twice"
    assert small_mistake(2 * parts[1], parts[0], parts) == "in_place"


def test_the_formula_without_a_fault_is_adamw():
    problem, ranges = draw(5, 12, 3), [(0, 4), (4, 8), (8, 12)]
    raw = problem.gradients.astype(np.float64).mean(1)
    norms = np.linalg.norm(raw, axis=1, keepdims=True)
    clipped = raw * np.minimum(1, problem.config.clip_norm / norms)
    found = run(lambda _: {}, problem.start.astype(np.float64), raw, clipped, problem.config)
    np.testing.assert_allclose(found, RIGHT.run(problem.start, problem.gradients, ranges, problem.config), atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_no_fault_of_the_formula_passes_for_right(seed):
    problem, ranges = draw(seed, 9, 3), [(0, 3), (3, 6), (6, 9)]
    wanted = RIGHT.run(problem.start, problem.gradients, ranges, problem.config)
    made = list(faulty(problem.start, problem.gradients, ranges, problem.config))
    assert len(made) == sum(map(len, FAULTS.values()))
    assert [key for key, values in made if np.all(np.abs(values - wanted) <= 2 * NEAR)] == []


@pytest.mark.parametrize("seed", range(5))
def test_what_a_ping_pong_returns_is_told_from_rounds_of_any_order(seed):
    late_s = next(iter(clock.slow_rounds(random.Random(seed), 2)))["late_s"]
    rounds = [clock.Round(seconds + 0.001, 0.35 * seconds, 0.0) for seconds in late_s]
    every_s, counted_s = [each.whole_s for each in rounds], [each.whole_s for each in rounds[1:]]
    right_s = statistics.median(counted_s) / 2
    assert clock.mistake(right_s * 1.05, rounds) == ""
    for found_s, key in (
        (2 * right_s, "not_halved"),
        (right_s / 2, "halved_twice"),
        (statistics.median(every_s) / 2, "warm_up"),
        (statistics.mean(counted_s) / 2, "mean"),
        (min(counted_s) / 2, "extreme"),
        (sum(counted_s), "all_rounds"),
        (1e6 * right_s, "unit"),
    ):
        assert clock.mistake(found_s, rounds) == key


def test_a_round_ends_with_its_receive_or_where_the_next_call_begins():
    blocking = [("Send", 0.0, 1.0), ("Recv", 1.0, 4.0), ("Send", 5.0, 6.0), ("Recv", 6.0, 9.0), ("bcast", 9.5, 9.6)]
    assert [(each.whole_s, each.send_s) for each in clock.rounds_of(blocking, 9.7)] == [(4.0, 1.0), (4.0, 1.0)]
    posted = [("Irecv", 0.0, 0.1), ("Isend", 0.1, 0.2), ("Barrier", 3.0, 5.0), ("Isend", 5.0, 5.1)]
    assert [(each.whole_s, each.barrier_s) for each in clock.rounds_of(posted, 8.0)] == [(2.9, 0.0), (3.0, 2.0)]
