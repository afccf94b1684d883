"""Lab 7 on right and wrong files: no right one fails a law, each mistake gets the hint that names it."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.checkpoint.interval import best_interval, simulated_loss, slowdown
from tests.course.laws_in_process import first_fault, right_files, wrong_files

LAB = "checkpoint"
WRONG = wrong_files(LAB, "plain")
FORKED = {  # what forked ranks find -> by which law
    **dict.fromkeys(("no_meeting_after_create", "all_create", "rename_without_meeting", "own_files"), "orders"),
    **dict.fromkeys(("gathers_all", "in_turn"), "at once"),
    **dict.fromkeys(("no_temporary", "rename_early", "error_ignored", "short_write"), "faults"),
    **dict.fromkeys(("error_alone", "rename_error_alone", "no_meeting_at_the_end"), "faults"),
    **dict.fromkeys(("not_truncated", "exclusive", "deletes_same"), "killed"),
    **dict.fromkeys(("no_sync", "root_syncs", "sync_before_writing"), "power"),
    **dict.fromkeys(("folder_not_synced", "folder_synced_first"), "power"),
}
ON_THREE = (  # what every rank of MPI sees
    *("remainder", "last_takes_all", "scan_with_own", "first_array_only", "step_forgotten", "no_checksum"),
    *("checksum_of_beginnings", "checksum_of_root", "table_unchecked", "raises_on_damage", "text_order"),
    *("name_taken_apart", "padded_name", "none_is_empty", "deletes_older", "takes_the_unfinished"),
)


@pytest.mark.timeout(200)
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(right_files(LAB)))
def test_right_files_obey_every_law(name, comm, shared_path):
    assert first_fault(LAB, right_files(LAB)[name], comm, shared_path) == ""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", sorted(FORKED))
def test_forked_ranks_show_a_mistake_by_the_hint_that_names_it(name, tmp_path):
    text, hints = WRONG[name]
    file = tmp_path / "student.py"
    file.write_text(text)
    law = next(law for law in load_lab(LABS[LAB]).laws if law.name == FORKED[name])
    with pytest.raises(LawError) as found:
        hold(law, SimpleNamespace(__file__=str(file)), tmp_path)
    assert found.value.hint in hints


def hold(law, student, folder):
    no_comm = cast(Any, None)
    for case in law.cases(random.Random(str(folder)), 1):
        law.check(Trial(student, None, no_comm, no_comm, random.Random(0), folder, case))


@pytest.mark.parallel([3])
@pytest.mark.parametrize("name", ON_THREE)
def test_ranks_of_mpi_show_a_mistake_by_the_hint_that_names_it(name, comm, shared_path):
    text, hints = WRONG[name]
    assert first_fault(LAB, text, comm, shared_path) in hints


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", ["reads_whole_file", "loads_everything"])
def test_memory_that_holds_all_is_noticed(name, comm, shared_path):
    text, hints = WRONG[name]
    assert first_fault(LAB, text, comm, shared_path) in hints


@pytest.mark.parametrize("name", sorted(WRONG))
def test_every_hint_that_has_to_come_has_words(name):
    lab = load_lab(LABS[LAB])
    assert all(lab.hint(key) != lab.hint("other") or key == "other" for key in WRONG[name][1])


@pytest.mark.parallel([2, 3, 4])  # HDF5 writes beside os: none of the laws of forked ranks, which are those of one rank
def test_what_races_run_obeys_the_laws(comm, shared_path):
    ours = "from hpcllm.course.labs.checkpoint.ours import load, newest, own_range, place, save"
    assert first_fault(LAB, ours, comm, shared_path) == ""


@pytest.mark.parametrize("mtbf_s", [3600.0, 1e5, 1e6])
def test_the_best_interval_is_young_s_square_root_where_failures_are_rare(mtbf_s):
    cost_s = mtbf_s / 1000
    best = best_interval(cost_s, mtbf_s)
    assert best == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.05)
    assert slowdown(best, cost_s, mtbf_s) <= min(slowdown(best * f, cost_s, mtbf_s) for f in (0.5, 0.9, 1.1, 2))


@pytest.mark.parametrize("cost_share", [1e-4, 1e-3, 1e-2])
def test_a_simulated_job_loses_what_the_formula_says(cost_share):
    mtbf_s = 1e5
    best = best_interval(cost_share * mtbf_s, mtbf_s)
    expected = 1 - 1 / slowdown(best, cost_share * mtbf_s, mtbf_s)
    assert simulated_loss(best, cost_share * mtbf_s, mtbf_s, seed=1) == pytest.approx(expected, rel=0.05)
