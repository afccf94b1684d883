"""The tour of the source: files that exist, as long as it says, in an order of imports; answers that come out."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hpcllm.checkpoint.slabs import Slab, runs, uncovered
from hpcllm.codecs.catalogue import find_codec
from hpcllm.collectives.legs import LAG
from hpcllm.mpi.partition import chunk_range
from hpcllm.pipeline.actions import Action, Placement, other_end
from hpcllm.pipeline.schedules import make_schedule, make_work
from hpcllm.pipeline.timing import simulate
from hpcllm.plan.time.timeline import StageTimes, earliest_ends, run

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs/explanation/reading.md").read_text(encoding="utf-8")
ANSWERS = (ROOT / "course/READING.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| (\d+) \| `([^`]+)` \| (\d+) \|", TOUR, re.MULTILINE)


def test_the_files_of_the_tour_are_there_and_about_as_long_as_it_says():
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for _, path, _ in STOPS}
    assert [int(stop) for stop, _, _ in STOPS] == list(range(1, 13))
    assert 1800 <= sum(lines.values()) <= 2400
    assert all(abs(lines[path] - int(said)) <= 0.1 * int(said) for _, path, said in STOPS)


def test_every_question_has_an_answer():
    def numbers(text: str) -> list[list[str]]:
        return [re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in re.split(r"(?:\*\*|## )Stop \d", text)[1:]]

    assert len(numbers(TOUR)) == len(STOPS)
    assert numbers(TOUR) == numbers(ANSWERS)


def test_names_that_questions_use_are_in_the_files():
    parts = re.split(r"\*\*Stop \d+", TOUR.split("## Where to go")[0])[1:]
    for (_, path, _), part in zip(STOPS, parts, strict=True):
        source = (ROOT / path).read_text(encoding="utf-8")
        names = [name for name in re.findall(r"`(\w+)`", part) if name not in ("run", "uncovered")]
        assert all(name in source for name in names), path


def test_numbers_of_the_answers_are_what_the_source_gives():
    owners = [str(rank) for rank in range(4) if len(range(*chunk_range(10, 4, rank))) == 3]
    assert f"Ranks {' and '.join(owners)}" in ANSWERS
    assert str(find_codec("int8:256", torch.float32).encoded_bytes(1_000_000)) in ANSWERS
    assert f"{10 + 2 * LAG}: 10 strips, and DEPTH = 2 LAG = {2 * LAG} turns" in ANSWERS
    assert [Placement(3, 2, kind).home(3) for kind in ("loop", "v")] == [(0, 1), (2, 1)]
    assert other_end(Placement(2, 2), 1, Action.parse("SEND_B3.1")) == (0, Action.parse("RECV_B3.1"))
    shares = [f"{100 * simulate(make_schedule(name, 4, 8)).bubble:.1f} %" for name in ("1f1b", "zb-h1")]
    assert re.search(f"{shares[0]}.*{shares[1]}", ANSWERS)
    last = [str(action) for action in make_work("zb-h1", 4, 8)[1][2]]
    assert last[last.index("I7") + 1 :] == ["W5", "W6", "W7"]
    first, second = (list(runs(Slab("w", *box), (5, 6), 4)) for box in (((0, 2), (3, 2)), ((3, 0), (2, 6))))
    assert ", ".join(map(str, first)) in ANSWERS
    assert f"{second[0]}, one run" in ANSWERS
    assert f'"{uncovered((4,), [Slab("w", (0,), (2,)), Slab("w", (1,), (3,))])}"' in ANSWERS
    alike = [StageTimes(1.0, 2.0, 1.0)] * 4
    assert earliest_ends("1f1b", Placement(4), 8, alike)[0] == run("1f1b", 4, 1, 8, alike, False)[0] == 33
    assert (earliest_ends("zb-h1", Placement(4), 8, alike)[0], run("zb-h1", 4, 1, 8, alike, False)[0]) == (24, 27)
