"""Lab 8 on right and wrong files; its formulas are those of our models, clock and planner; its rows are facts."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from mpi4py import MPI

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import Trial
from hpcllm.course.labs.planner import laws, measured, mistakes, ours, published, search
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.course.small_run import small_config
from hpcllm.model.shapes import flops_per_token, parameter_count
from hpcllm.pipeline.schedules import make_schedule
from hpcllm.pipeline.timing import simulate
from tests.course.laws_in_process import first_fault, right_files, wrong_files

LAB = "planner"
MISTAKES = sorted(wrong_files(LAB, "plain"))
ROOT = Path(__file__).parents[2]
QUICK = Machine(1e12, 0.5, 1e9, 8, 0.0, math.inf, math.inf)  # its links take no time


def trial_of(student: object, case: dict[str, object]) -> Trial:
    return Trial(student, None, None, None, random.Random(0), Path(), case)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(right_files(LAB)))
def test_right_files_obey_every_law(name, seed, tmp_path):
    assert first_fault(LAB, right_files(LAB)[name], MPI.COMM_SELF, tmp_path, seed) == ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_the_hint_that_names_it(name, tmp_path):
    text, hints = wrong_files(LAB, "plain")[name]
    try:
        found = first_fault(LAB, text, MPI.COMM_SELF, tmp_path, len(name))
    except ValueError:
        found = "exception"
    assert found in hints


def test_every_hint_that_has_to_come_has_words_and_every_word_a_mistake():
    lab, expected = load_lab(LABS[LAB]), {key for _, hints in wrong_files(LAB, "plain").values() for key in hints}
    assert all(lab.hint(key) != lab.hint("other") for key in expected)
    known = (mistakes.SIZES, mistakes.FLOPS, mistakes.WEIGHTS, mistakes.STATES, mistakes.ACTIVATIONS, mistakes.TIME)
    assert {key for each in known for key in each} <= set(lab.hints)


@pytest.mark.parametrize("seed", range(20))
def test_the_reference_counts_as_our_models_and_our_planner(seed):
    drawn = random.Random(seed)
    model = laws.draw_model(drawn, 4 * drawn.randrange(1, 4))
    config = laws.config_of(model)
    assert ours.parameters(model) == parameter_count(config)
    assert ours.flops(model, 7) == pytest.approx(7 * flops_per_token(config, model.sequence), rel=1e-12)
    layout = Layout(*(drawn.choice((1, 2, 4)) for _ in range(4)), drawn.random() < 0.5, drawn.random() < 0.5)
    batch = layout.dp * layout.micro_batch * drawn.randrange(1, 9)
    found, wanted = ours.memory_bytes(model, layout, batch), laws.planned_memory(model, layout, batch)
    for kind in ours.KINDS:
        near = laws.ACTIVATIONS_NEAR / 2 if kind == "activations" else 1e-12
        assert found[kind] == pytest.approx(wanted[kind], rel=near)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
def test_the_bubble_is_that_of_the_clock(p, m):
    model, layout = Model(p, 8, 1, 32, 16, 8), Layout(pp=p)
    work = ours.flops(model, m * model.sequence) / (p * QUICK.peak_flops_per_s * QUICK.efficiency)
    idle = simulate(make_schedule("1f1b", p, m)).bubble
    assert ours.step_seconds(model, layout, QUICK, m) == pytest.approx(work / (1 - idle), rel=1e-12)


def test_every_mistake_is_one_in_a_step_that_has_all_parts():
    model, layout, batch = Model(8, 64, 4, 256, 512, 32, True), Layout(4, 2, 4, 3, True, True), 84
    machine = Machine(1e12, 0.5, 1e9, 4, 1e-3, 1e9, 1e9)
    right = ours.step_seconds(model, layout, machine, batch)
    for key, changes in mistakes.TIME.items():
        for change in changes:
            found = ours.step_seconds(model, layout, machine, batch, replace(ours.RIGHT, **change))
            is_far = change.get("links") == "far"  # it is the same where replicas are on several nodes, but for tp
            assert found != pytest.approx(right, rel=1e-9) or is_far, key


def test_a_law_finds_what_is_slightly_wrong():
    """A step of 1 % more, a byte more a parameter, one weight too many: all are told from rounding."""
    case = {"part": "all", "recompute": True, "node": 4, "seed": 1, "gated": True}
    off = [
        (laws.check_time, "step_seconds", lambda *a: 1.01 * ours.step_seconds(*a)),
        (laws.check_sizes, "parameters", lambda *a: ours.parameters(*a) + 1),
        (laws.check_flops, "flops", lambda *a: (1 + 1e-9) * ours.flops(*a)),
        (laws.check_efficiency, "sustained_efficiency", lambda *a: 1.01 * ours.sustained_efficiency(*a)),
    ]
    for check, name, function in off:
        student = type("Student", (), {key: staticmethod(getattr(ours, key)) for key in load_lab(LABS[LAB]).functions})
        check(trial_of(student, case))
        setattr(student, name, staticmethod(function))
        with pytest.raises(laws.LawError):
            check(trial_of(student, case))


@pytest.mark.parametrize("seed", range(5))
def test_each_careless_search_meets_a_case_that_tells(seed):
    found = list(search.cases(random.Random(seed), 1))[1:-1]
    assert all(search.tells(case, careless) for case, careless in zip(found, search.CARELESS, strict=True))


def test_published_rows_are_those_of_the_planner():
    sys.path.insert(0, str(ROOT / "perf" / "plan"))
    try:
        from published import read_rows
    finally:
        sys.path.pop(0)
    known = {row.id: row for row in read_rows()}
    groups = published.read_groups()
    assert sum(len(group.runs) for group in groups) == 44
    for group in groups:
        for run in group.runs:
            row = known[run.id]
            assert (run.batch, run.seconds, group.plan) == (row.global_batch, row.time_s, (row.machine, row.model))
            assert sorted(run.text.split(",")) == sorted(row.layout.split(","))


def test_the_first_row_of_a_group_is_the_one_of_the_median_time():
    for group in published.read_groups():
        seconds = sorted(run.seconds for run in group.runs)
        assert group.runs[0].seconds == seconds[(len(seconds) - 1) // 2]


def test_published_runs_are_predicted_as_the_sheet_says():
    trial = trial_of(ours, {})
    off = [max(row.ratio, 1 / row.ratio) for row in published.times_race(trial)]
    assert len(off) == 39
    assert median(off) < 1.05
    (order,) = published.order_race(trial)
    assert 2 - order.student > 0.85


def test_the_small_run_trains_the_model_that_is_predicted(tmp_path):
    for name, layout, batch in (("first", *measured.FIRST), *measured.OTHERS):
        config = small_config(tmp_path / "store.h5", 2, **measured.tables(layout, batch, name))
        shape = replace(config.model, vocabulary=measured.MODEL.vocabulary)
        assert parameter_count(shape) == ours.parameters(measured.MODEL)
        assert layout.dp * layout.tp * layout.pp == measured.RANKS
        assert config.pipeline.microbatches == ours.microbatches(layout, batch)


def test_what_is_measured_calibrates_and_predicts():
    """Seconds that the formula gives for a machine are predicted exactly, whatever its efficiency was."""
    machine = replace(measured.machine_of(4e-3, 1e-4), efficiency=0.03)
    cases = [measured.FIRST, *((layout, batch) for _, layout, batch in measured.OTHERS)]
    seconds = [ours.step_seconds(measured.MODEL, layout, machine, batch) for layout, batch in cases]
    assert measured.predicted(ours, [*seconds, 4e-3, 1e-4]) == pytest.approx(seconds[1:], rel=1e-9)


@pytest.mark.parallel([2, 4])
def test_steps_of_all_layouts_are_measured_while_other_ranks_sleep(comm, shared_path, monkeypatch):
    monkeypatch.setattr(measured, "ROUNDS", 2)
    trial = Trial(ours, None, None, comm, random.Random(0), shared_path)
    rows = list(measured.race(trial))
    assert [row.label for row in rows] == [label for label, _, _ in measured.OTHERS]
    assert all(0 < row.ours < 60 and 0 < row.student < 60 for row in rows)
