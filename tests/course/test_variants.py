"""The variants of course/: each wrong one is one, and laws of one rank find theirs by the hint that belongs to it."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import GENERAL, LawError, Trial
from hpcllm.course.student_file import borrowed_name, load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "course"))

from campaign import BASES, Variant, report, run, variants  # noqa: E402 -- a folder that is no package

VARIANTS = list(variants())
FITS = ("swapped", "bandwidth", "absolute_errors", "half_a_ring", "whole_arrays", "a_hop_too_many", "one_latency")
FITS += ("roots_of_the_times", "right_side_not_divided", "megabytes", "chunks_rounded", "no_latency")
ALONE = [v for v in VARIANTS if v.lab == "pipeline" and v.hints not in (("endless",), ("predicts_idle",))]
ALONE += [v for v in VARIANTS if v.lab == "latency" and (not v.hints or v.name in FITS)]
SAMPLED = ("allreduce/second_half_adds", "tensor_parallel/ranges_of_the_world")


def name(variant: Variant) -> str:
    return f"{variant.lab}/{variant.name}"


@pytest.mark.parametrize("lab", sorted(BASES))
def test_a_lab_has_three_right_and_twelve_wrong_variants_with_hints_that_exist(lab):
    mine = [variant for variant in VARIANTS if variant.lab == lab]
    assert sum(not variant.hints for variant in mine) >= 3
    assert sum(bool(variant.hints) for variant in mine) >= 12
    known = {*load_lab(LABS[lab]).hints, *GENERAL}
    assert {hint for variant in mine for hint in variant.hints} <= known
    assert len({variant.text for variant in mine}) == len(mine)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.hints], ids=name)
def test_a_right_file_loads_and_borrows_nothing(variant, tmp_path):
    file = tmp_path / f"{variant.lab}.py"
    file.write_text(variant.text, encoding="utf-8")
    student = load_file(file)
    assert borrowed_name(student) == ""
    assert all(callable(getattr(student, each)) for each in load_lab(LABS[variant.lab]).functions)


@pytest.mark.parametrize("variant", ALONE, ids=name)
def test_laws_of_one_rank_tell_right_from_wrong(variant, tmp_path):
    """Laws alone, in this process, with a seed of its own each; the race too, which is arithmetic in this lab."""
    lab, student = load_lab(LABS[variant.lab]), SimpleNamespace()
    exec(compile(variant.text, variant.name, "exec", dont_inherit=True), student.__dict__)
    trial = Trial(student, None, cast(Any, None), cast(Any, None), random.Random(variant.name), tmp_path)
    cases = ((law, case) for law in lab.laws if law.ranks == (1,) for case in law.cases(trial.random, 1))
    found = ""
    try:
        for law, case in cases:
            trial.case = case
            law.check(trial)
        for race in lab.races if variant.lab == "pipeline" else ():
            found = race.hint if max(row.ratio for row in race.measure(trial)) > race.bands[0][0] else found
    except LawError as error:
        found = error.hint
    except IndexError:
        found = "exception"
    assert found in variant.hints or not (found or variant.hints)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if name(v) in SAMPLED], ids=name)
def test_a_check_gives_the_hint_that_belongs_to_the_mistake(variant):
    result = run(variant, 0)
    assert not result["laws_hold"]
    assert result["hint"] in variant.hints
    assert report([result])[1].split()[:6] == [variant.lab, "1", "100", "%", "100", "%"]
