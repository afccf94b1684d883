"""The course before a check: labs are whole, `start` gives what it says, mistakes are told before any work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from setuptools import find_packages

from hpcllm.cli.main import main
from hpcllm.course.catalogue import LABS, find_lab, load_lab
from hpcllm.course.lab import GENERAL, LawError, Prediction, Row
from hpcllm.course.launch import launch_command
from hpcllm.course.runner import Outcome
from hpcllm.course.score import grade

ROOT = Path(__file__).parents[2]
LABS_FOLDER = ROOT / "hpcllm" / "course" / "labs"
GUIDE = (ROOT / "course/GUIDE.md").read_text(encoding="utf-8")


def test_every_folder_of_a_lab_is_in_the_catalogue():
    folders = {path.parent.name for path in LABS_FOLDER.glob("*/checks.py")}
    assert folders == set(LABS)
    assert len({entry.number for entry in LABS.values()}) == len(LABS)


@pytest.mark.parametrize("name", sorted(LABS))
def test_a_lab_is_whole(name):
    lab, entry = load_lab(LABS[name]), LABS[name]
    assert (lab.number, lab.name, lab.title) == entry
    parts = [part.name for part in (*lab.laws, *lab.races)] + [part.key for part in lab.predictions]
    assert len(set(parts)) == len(parts)
    assert {race.hint for race in lab.races} <= {*lab.hints, *GENERAL}
    with pytest.raises(ValueError, match="add up"):
        replace(lab, laws=lab.laws[1:])


@pytest.mark.parametrize("name", sorted(LABS))
def test_start_writes_a_file_with_all_its_names_and_a_sheet_that_asks_for_all_predictions(name, tmp_path, capsys):
    folder, lab = tmp_path / "with a space", load_lab(LABS[name])
    assert main(["course", "start", str(lab.number), str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {f"{name}.py", "sheet.md"}
    found: dict = {}
    exec(compile((folder / f"{name}.py").read_text(), "student", "exec", dont_inherit=True), found)
    assert all(callable(found[function]) for function in lab.functions)
    assert found["PREDICTIONS"] == {prediction.key: None for prediction in lab.predictions}
    sheet = (folder / "sheet.md").read_text()
    assert all(f"`{prediction.key}`" in sheet for prediction in lab.predictions)
    assert all(f"`{function}`" in sheet for function in lab.functions)
    assert "written" in capsys.readouterr().out


def test_start_never_writes_over_a_file(tmp_path, capsys):
    (tmp_path / "allreduce.py").write_text("work")
    assert main(["course", "start", "allreduce", str(tmp_path)]) == 2
    assert (tmp_path / "allreduce.py").read_text() == "work"
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "allreduec"], "did you mean allreduce?"),
        (["check", "--folder", "missing"], "no file of a lab"),
        (["check", "allreduce", "--folder", "."], "course start allreduce"),
        (["grade", "missing"], "no file of a lab"),
        (["demo", "99"], "there is no lab '99'"),
        (["check", "--plot", "x.txt"], "valid: a name that ends in"),
    ],
)
def test_mistakes_are_told_with_what_would_be_valid(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["course", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_check_inside_a_job_of_several_ranks_is_rejected(tmp_path):
    (tmp_path / "allreduce.py").write_text("")
    words = [sys.executable, "-m", "hpcllm.course", "check", "--folder", str(tmp_path)]
    # the process believes the launcher's variable; MPI itself is then asked to end all ranks together
    done = subprocess.run(words, env={**os.environ, "PMI_SIZE": "2"}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "starts its ranks by itself" in done.stderr


def test_list_as_json_has_every_lab(capsys):
    assert main(["course", "list", "--json"]) == 0
    assert [fact["name"] for fact in json.loads(capsys.readouterr().out)] == list(LABS)


def outcome(records: list[dict], **fields) -> Outcome:
    return Outcome([records], **fields)


@pytest.mark.parametrize("name", sorted(LABS))
def test_points_go_up_to_the_first_law_that_does_not_hold(name):
    lab = load_lab(find_lab(name))
    for broken in range(len(lab.laws)):
        held = [{"event": "held", "part": part} for part in range(broken)]
        fault = {"hint": "deadlock", "shown": "x", "stage": "laws", "part": broken}
        found = grade(lab, outcome(held, fault=fault), {})
        assert found.earned == sum(law.points for law in lab.laws[:broken])
        assert not found.all_laws_hold
        assert found.first_hint
        assert (found.first_hint.name, found.first_hint.hint) == (lab.laws[broken].name, GENERAL["deadlock"])


@pytest.mark.parametrize("name", sorted(LABS))
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.5, 100.0])
def test_a_race_earns_no_more_the_slower_it_is(name, ratio):
    lab = load_lab(find_lab(name))
    rows = [
        {"event": "row", "part": part, "row": vars(Row("s", 1.0, seconds, 1.0))}
        for part in range(len(lab.races))
        for seconds in (ratio, ratio, 1000.0)  # one stall is no slowness: the median counts
    ]
    races = [part for part in grade(lab, outcome(rows), {}).parts if part.stage == "races"]
    for part, race in zip(races, lab.races, strict=True):
        judged = max(ratio, 1 / ratio) if race.both_ways else ratio
        assert part.earned == race.points * next((share for most, share in race.bands if judged <= most), 0)
        assert bool(part.hint) == (part.earned < race.points)


@pytest.mark.parametrize(
    ("predicted", "within", "is_right"),
    [
        *((6, 1, True), (7, 1, False), (None, 1, False), (3.1, 2, True), (2.9, 2, False), (11.9, 2, True)),
        *((-6, 2, False), (float("inf"), 2, False), (float("nan"), 2, False)),
    ],
)
def test_a_prediction_is_right_within_its_factor_on_both_sides(predicted, within, is_right):
    lab = load_lab(find_lab("allreduce"))
    key = lab.predictions[0].key
    asked = Prediction(key, "?", lab.predictions[0].points, lambda _: 0, within)
    lab = replace(lab, predictions=(asked, *lab.predictions[1:]))
    record = {"event": "measured", "part": 0, "measured": 6.0, "predicted": predicted}
    part = next(part for part in grade(lab, outcome([record]), {}).parts if part.name == key)
    assert part.earned == (part.points if is_right else 0)
    assert ("6" in part.seen.split()[-1]) == is_right  # a wrong one does not learn the number


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.04, 2.0])
def test_a_race_against_what_was_measured_judges_too_little_as_too_much(factor):
    lab = load_lab(LABS["planner"])
    number, race = next((number, race) for number, race in enumerate(lab.races) if race.both_ways)
    row = asdict(Row("a layout", 1.0, 3 * factor, 3.0))
    part = next(part for part in grade(lab, outcome([{"event": "row", "part": number, "row": row}]), {}).parts
                if part.name == race.name)  # fmt: skip
    off = max(factor, 1 / factor)
    assert part.seen.startswith(f"{off:.2f} times off what was measured")
    assert (part.earned == part.points) == (off <= race.bands[0][0])


def test_ranks_are_started_by_what_is_there(tmp_path):
    for name in ("srun", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\necho Open MPI\n")
        (tmp_path / name).chmod(0o755)
    words, environment = launch_command(4, {"PATH": str(tmp_path), "SLURM_JOB_ID": "1", "PMI_SIZE": "2"})
    assert words[0] == str(tmp_path / "srun")
    assert "PMI_SIZE" not in environment
    words, environment = launch_command(4, {"PATH": str(tmp_path), "TMPDIR": "/" + "x" * 90})
    assert words[-2:] == ["-n", "4"]
    assert environment["TMPDIR"] == "/tmp"


def test_solutions_are_not_in_the_package():
    tracked = subprocess.run(["git", "ls-files"], cwd=LABS_FOLDER, capture_output=True, text=True).stdout.split()
    assert not [path for path in tracked if "right" in path or "solution" in path]


def test_what_instructors_have_is_in_no_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(
        str(ROOT),
        **{
            key: settings["packages"]["find"][key]
            for key in ("include", "exclude")
            if key in settings["packages"]["find"]
        },
    )
    assert "hpcllm.course" in packages
    assert not [name for name in packages if name.partition(".")[0] != "hpcllm"]
    files = [path for pattern in settings["package-data"]["hpcllm"] for path in (ROOT / "hpcllm").glob(pattern)]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files if "course" in path.parts]
    assert texts
    assert not [text for text in texts if "nstructor" in text]


@pytest.mark.parametrize("name", sorted(LABS))
def test_the_guide_has_each_lab_with_hints_that_exist(name):
    lab = load_lab(LABS[name])
    part = GUIDE.split(f"## Lab {lab.number}: ")[1].split("\n## ")[0]
    hints = {key for row in re.findall(r"^\|.*\|(.*)\|$", part, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert len(hints) >= 5
    assert hints <= {*lab.hints, *GENERAL}


def test_a_law_error_keeps_its_hint_apart_from_what_it_shows():
    error = LawError("owner", "rank 1")
    assert (error.hint, error.shown, str(error)) == ("owner", "rank 1", "rank 1")
