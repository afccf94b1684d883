"""The sample of tests/run.sh: no function is lost, every value of a parameter stays, all ranks choose the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import hypothesis
import pytest
import sampling
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
RUN = ["bash", str(ROOT / "tests" / "run.sh")]
grids = st.lists(st.integers(1, 6), min_size=1, max_size=3).flatmap(
    lambda sizes: st.lists(st.tuples(*(st.integers(0, size) for size in sizes)), min_size=1, max_size=40)
)


def cover(cases):
    """Indices of the serial cases that are kept."""
    return sampling.cover(rows_of(cases), names_of(cases), [0] * len(cases), Counter())


def rows_of(cases):
    return sampling.numbered([{str(name): value for name, value in enumerate(case)} for case in cases])


def names_of(cases):
    return [f"test[{'-'.join(map(str, case))}-{index}]" for index, case in enumerate(cases)]


@given(cases=grids)
def test_every_value_of_every_parameter_is_chosen_by_no_more_cases_than_values(cases):
    chosen = cover(cases)
    values = {(name, value) for case in cases for name, value in enumerate(case)}
    assert {(name, value) for index in chosen for name, value in enumerate(cases[index])} == values
    assert 1 <= len(chosen) <= len(values)


def test_a_grid_takes_about_as_many_cases_as_its_longest_side():
    cases = [(rank, algorithm, codec) for rank in range(5) for algorithm in range(6) for codec in range(9)]
    assert 9 <= len(cover(cases)) <= 12


def test_a_function_without_parameters_stays():
    assert cover([()]) == [0] == sampling.spread(["test"], 1)
    assert cover([]) == []


@given(functions=st.lists(st.sampled_from([(1, 2, 3, 4), (2, 3), (3,), (1, 4), (1,)]), max_size=30))
def test_functions_of_a_file_take_turns_on_several_ranks(functions):
    """Each runs on several ranks where it may, and on the number of them that has cost least before."""
    used: Counter[int] = Counter()
    for number, sizes in enumerate(functions):
        before = Counter(used)
        rows = sampling.numbered([{"several ranks": True} if size > 1 else {} for size in sizes])
        (index,) = sampling.cover(rows, [f"test_{number}[nprocs={size}]" for size in sizes], sizes, used)
        assert sizes[index] > 1 or max(sizes) == 1
        assert before[sizes[index]] == min(before[size] for size in sizes if size > 1 or max(sizes) == 1)
        assert used - before == Counter({sizes[index]: sizes[index] ** 2})


def test_a_file_with_several_functions_meets_several_numbers_of_ranks(request):
    """Of the files that were collected here."""
    sizes, kept = defaultdict(set), defaultdict(list)
    for item in request.session.items:
        sizes[item.path].add(sampling.ranks_of(item))
    for item in sampling.sample(request.session.items, "sample"):
        kept[item.path].append(sampling.ranks_of(item))
    for path, ranks in kept.items():
        most = len({size for size in sizes[path] if size in (2, 3, 4)})
        assert len({*ranks} - {0, 1}) >= min(2, most, sum(rank > 1 for rank in ranks)), path


def test_values_that_have_no_hash_or_equal_others_of_another_type_are_told_apart():
    shared: list[int] = []
    rows = sampling.numbered([{"x": shared}, {"x": []}, {"x": shared}, {"x": 1}, {"x": True}, {"x": 1.0}])
    assert rows[0] == rows[2]
    assert len({*rows}) == 5


def test_every_function_of_this_session_stays_or_is_left_with_a_reason(request):
    """Of the tests that were collected here: with --all all of a group."""
    items = request.session.items
    kept = sampling.sample(items, "sample")
    for name, cases in sampling.functions(items).items():
        if kept.keys().isdisjoint(cases):
            assert len(sampling.why_left(cases[0])) > 20, name
    assert kept.keys() <= set(items)


def test_a_case_for_every_mode_of_the_device_runs_in_one_by_turns(pytester, monkeypatch):
    functions = "\n".join(
        f"@pytest.mark.parallel([2, 3])\n@pytest.mark.pretend\ndef test_{i}(): pass" for i in range(6)
    )
    pytester.makepyfile(f"import pytest\n{functions}\n@pytest.mark.parallel(2)\ndef test_of_the_cpu(): pass")
    monkeypatch.delenv("HPCLLM_TESTS", raising=False)
    lines = {}
    for mode in ("sealed", "open"):
        monkeypatch.setenv("HPCLLM_PRETEND", mode)
        listed = pytester.runpytest_inprocess("-p", "sampling", "--sample", "sample", "--collect-only", "-q")
        lines[mode] = {line for line in listed.outlines if "::" in line}
    assert len(lines["sealed"]) == len(lines["open"]) == 3
    assert lines["sealed"].isdisjoint(lines["open"])


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("level", ["sample", "fast"])
def test_all_ranks_choose_the_same(comm, request, level):
    chosen = [item.nodeid for item in sampling.sample(request.session.items, level)]
    assert len({*map(tuple, comm.allgather(chosen))}) == 1


def test_turns_are_taken_among_the_groups_that_are_named(pytester, monkeypatch):
    functions = "\n".join(f"@pytest.mark.parallel([2, 3, 4])\ndef test_{i}(): pass" for i in range(6))
    pytester.makepyfile(f"import pytest\n{functions}\ndef test_serial(): pass")
    for named, kept in ("3", 6), ("3 4", 6), ("serial+1", 1), ("serial 2", 7):
        monkeypatch.setenv("HPCLLM_TESTS", named)
        listed = pytester.runpytest_inprocess("-p", "sampling", "--sample", "sample", "--collect-only", "-q").outlines
        assert sum("::" in line for line in listed) == kept
        assert ("nprocs=3" in "".join(listed)) == ("3" in named)


def test_hypothesis_is_asked_for_fewer_examples(pytester):
    pytester.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        count = 0
        @settings(max_examples=100, database=None, derandomize=True)
        @given(st.floats())
        def test_law(x):
            global count
            count += 1
        def test_count():
            assert 10 <= count <= 30
        """
    )
    outcome = pytester.runpytest_inprocess("-p", "sampling", "--sample", "sample")
    outcome.assert_outcomes(passed=2)
    assert hypothesis.settings().max_examples == 100


def test_left_tests_run_with_all_and_in_groups_that_are_named(pytester, monkeypatch):
    monkeypatch.delenv("HPCLLM_TESTS", raising=False)
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.full(reason="takes an hour", in_ci=True)
        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.full(reason="takes a week"))])
        def test_long(x): pass
        @pytest.mark.full(reason="takes a day")
        def test_longer(): pass
        @pytest.mark.parametrize("x", range(5))
        @pytest.mark.parametrize("y", range(5))
        def test_short(x, y): pass
        """
    )
    passed = {}
    for level, least, most in ("all", 28, 28), ("sample", 5, 9), ("fast", 1, 1):
        outcome = pytester.runpytest_inprocess("-p", "sampling", "--sample", level).parseoutcomes()
        passed[level] = outcome["passed"]
        assert least <= passed[level] <= most
    listed = pytester.runpytest_inprocess("-p", "sampling", "--sample", "sample", "--list-left", "--collect-only")
    listed.stdout.fnmatch_lines(
        ["*test_long: takes an hour", "*test_longer: takes a day", "1 of 3 functions run, with * of 28 cases"]
    )
    monkeypatch.setenv("HPCLLM_TESTS", "serial")
    for level, more in ("sample", 1), ("fast", 0):  # test_long[1]
        outcome = pytester.runpytest_inprocess("-p", "sampling", "--sample", level).parseoutcomes()
        assert outcome["passed"] == passed[level] + more


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fast", "--all"], "--fast, --sample and --all exclude each other"),
        (["--all", "--list-left"], "--all leaves nothing"),
        (["--list-left", "-k", "ring"], "--list-left is of all tests, not of -k"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_once(arguments, says):
    environment = {name: value for name, value in os.environ.items() if name != "HPCLLM_TESTS"}  # CI's choice of groups
    answer = subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=20, env=environment)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"tests/run.sh: error: {says}")
    assert answer.stdout == ""


def test_help_names_every_option():
    told = subprocess.run([*RUN, "-h"], capture_output=True, text=True, timeout=20, check=True).stdout
    assert all(option in told for option in ("--fast", "--all", "--list-left", "--coverage", "HPCLLM_TESTS"))


@pytest.mark.full(reason="imports every test file, which takes half a minute")
def test_what_the_default_leaves_is_a_short_list_with_reasons():
    line = [sys.executable, "-m", "pytest", "-q", "-p", "sampling", "--sample", "sample", "--list-left"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    for name in ("HPCLLM_PRETEND", "HPCLLM_TESTS"):
        environment.pop(name, None)
    told = subprocess.run([*line, "--collect-only"], capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    left = [row for row in told.splitlines() if "::" in row]
    assert 0 < len(left) < 50
    assert all(": runs in group " in row or "minute" in row for row in left)
