"""Lab 1: laws of one rank, and of two, judge the files of course/latency as they should."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import GENERAL, Law, LawError, Trial
from hpcllm.course.labs.latency import fits, round_trips
from hpcllm.course.labs.latency.checks import RANKS, crossover_bytes, model_s
from hpcllm.course.watched import watched

FOLDER = Path(__file__).parents[2] / "course" / "latency"
RIGHT = {path.stem: path.read_text() for path in sorted((FOLDER / "right").glob("*.py"))}
WRONG = tomllib.loads((FOLDER / "wrong.toml").read_text())
LAB = load_lab(LABS["latency"])
IN_TIMES = ("half", "span", "warm_up", "cpu_time", "each", "unit", "restart", "shape")
OF_TWO = [name for name, fault in WRONG.items() if fault["hints"][0] in IN_TIMES]
OF_ONE = {*fits.HINTS, *LAB.hints} - {*round_trips.HINTS, "forbidden", "prediction"}
ALONE = [name for name, fault in WRONG.items() if fault["hints"][0] in OF_ONE]


def wrong(name: str) -> str:
    text = RIGHT["plain"]
    for old, new in WRONG[name]["replace"]:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def module(text: str) -> SimpleNamespace:
    found: dict[str, Any] = {"__name__": "student"}
    exec(compile(text, "student", "exec", dont_inherit=True), found)
    return SimpleNamespace(**found)


def hint(text: str, laws: list[Law], seed: int, comm: MPI.Intracomm) -> str:
    """Return the first hint of these laws on comm; empty: all hold. Collective over comm."""
    student, found = module(text), ""
    for law in laws:
        for number, case in enumerate(law.cases(random.Random(seed), comm.size)):
            name = f"{seed}/{number}"
            trial = Trial(
                student, None, watched(comm, (), random.Random(name)), comm, random.Random(name), FOLDER, case
            )
            try:
                law.check(trial)
            except LawError as error:
                found = error.hint
            if found := comm.allgather(found)[0]:
                return found
    return ""


def laws_of(*ranks: int) -> list[Law]:
    return [law for law in LAB.laws if law.ranks == ranks]


def test_each_wrong_file_is_one_of_its_own_and_names_a_hint():
    texts = [wrong(name) for name in WRONG]
    assert len({*texts, *RIGHT.values()}) == len(WRONG) + len(RIGHT)
    assert {fault["hints"][0] for fault in WRONG.values()} <= {*LAB.hints, *GENERAL}
    assert len(RIGHT) >= 4
    assert len(WRONG) >= 12


@pytest.mark.parametrize("name", list(RIGHT))
def test_laws_of_one_rank_hold_for_right_files_whatever_is_drawn(name):
    assert [hint(RIGHT[name], laws_of(1), seed, MPI.COMM_SELF) for seed in range(5)] == [""] * 5


@pytest.mark.parametrize("name", ALONE)
def test_laws_of_one_rank_give_wrong_files_their_hint_whatever_is_drawn(name):
    assert {hint(wrong(name), laws_of(1), seed, MPI.COMM_SELF) for seed in range(5)} == {WRONG[name]["hints"][0]}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", list(RIGHT))
def test_times_hold_for_right_files(name, comm):
    assert hint(RIGHT[name], [LAB.laws[0], *laws_of(2)], 1, comm) == ""


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", OF_TWO)
def test_times_give_wrong_files_their_hint(name, comm):
    assert hint(wrong(name), [LAB.laws[0]], 1, comm) == WRONG[name]["hints"][0]


@pytest.mark.parallel([2])
def test_a_clock_that_is_set_is_found_and_put_right_again(comm):
    import time

    before = time.time
    assert hint(wrong("time_of_day"), laws_of(2), 1, comm) == "clock"
    assert time.time is before


@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 16, 31, 100, 1024])
def test_at_the_crossover_both_formulas_agree(ranks):
    size_bytes = crossover_bytes(ranks, 3e-6, 2e-10)
    both = [model_s(name, ranks, size_bytes, 3e-6, 2e-10) for name in ("ring", "recursive_doubling")]
    assert both[0] == pytest.approx(both[1], rel=1e-9)
    assert model_s("ring", ranks, 2 * size_bytes, 3e-6, 2e-10) < 2 * both[0]


def test_two_ranks_have_no_crossover():
    assert crossover_bytes(2, 3e-6, 2e-10) == float("inf")
    assert LAB.laws[0].ranks[-1] == RANKS
