"""Lab 6 on right and wrong files: no right one fails a law, each mistake gets the hint that names it."""

from __future__ import annotations

import pytest

from hpcllm.course.catalogue import LABS, load_lab
from tests.course.laws_in_process import first_fault, right_files, wrong_files

LAB = "zero"
FOR_REAL_CHECKS = (  # a deadlock, what not every rank sees, a prediction
    *("root_gathers", "whole_copies", "own_bits", "state_values_for_bytes"),
)
MISTAKES = sorted(set(wrong_files(LAB, "plain")) - set(FOR_REAL_CHECKS))


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(right_files(LAB)))
def test_right_files_obey_every_law(name, comm, shared_path):
    assert first_fault(LAB, right_files(LAB)[name], comm, shared_path) == ""


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # a mistake divides by zero
@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_the_hint_that_names_it(name, comm, shared_path):
    text, hints = wrong_files(LAB, "plain")[name]
    assert first_fault(LAB, text, comm, shared_path) in hints


@pytest.mark.parametrize("name", sorted(wrong_files(LAB, "plain")))
def test_every_hint_that_has_to_come_has_words(name):
    lab = load_lab(LABS[LAB])
    assert all(lab.hint(key) != lab.hint("other") or key == "other" for key in wrong_files(LAB, "plain")[name][1])


@pytest.mark.parallel([1, 3, 4])
def test_what_races_run_obeys_the_laws(comm, shared_path):
    ours = "from hpcllm.course.labs.zero.ours import new_state, own_range, update"
    assert first_fault(LAB, ours, comm, shared_path) == ""
