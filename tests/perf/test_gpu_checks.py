"""The report of the first minutes on a GPU names what failed, what was skipped, and what tests said of the device."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.system.test_job import launcher

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf"))
import gpu_checks
import gpu_report

TESTS = """
import os, warnings
import pytest
from mpi4py import MPI

@pytest.mark.parallel([1, 2])
def test_same_bits(record_property):
    record_property("bits of dp", "1" if SAME else os.environ.get("CUDA_LAUNCH_BLOCKING", "0"))
    record_property("attention", "a kernel | of flash")

@pytest.mark.parallel([1, 2])
def test_that_one_rank_fails():
    assert MPI.COMM_WORLD.rank + 1 < MPI.COMM_WORLD.size, "the last rank"

@pytest.mark.parallel([1, 2])
def test_that_is_left_out():
    warnings.warn("a prototype")
    pytest.skip("no such device")

@pytest.mark.parallel([1, 2])
def test_that_dies():
    if DIES:
        os._exit(7)
"""


def launched(ranks: int, command: list[str]) -> list[str]:
    return [*launcher(ranks), *command]


def records(folder: Path, same: bool = True, dies: bool = False, ranks: int = 2) -> dict[str, dict]:
    (folder / "test_a_device.py").write_text(TESTS.replace("SAME", str(same)).replace("DIES", str(dies)))
    which = [check for check in gpu_checks.all_checks(None) if check.ranks == ranks]
    return {record["check"]: record for record in gpu_checks.checks(launched, folder, which)}


def bits(found: dict[str, dict], ranks: int) -> dict:
    return next(record for name, record in found.items() if name.startswith("bits") and name.endswith(f"{ranks} ranks"))


def test_failures_skips_facts_and_warnings_are_named(tmp_path):
    found, name = records(tmp_path), gpu_checks.named(2)
    (failed,) = found[name]["failed"].items()
    assert failed[0].startswith("test_a_device.py::test_that_one_rank_fails")
    assert "the last rank" in failed[1]
    assert (found[name]["passed"], found[name]["exit_code"]) == (2, 1)
    assert found[name]["skipped"] == {"no such device": 1}
    assert "a prototype" in found[name]["warnings"]
    text = "\n".join(gpu_report.check_lines({"versions": {"driver": "NVIDIA 1"}}, *found.values()))
    for words in ("the last rank", "no such device: 1", "attention: a kernel / of flash", "driver: NVIDIA 1"):
        assert words in text
    assert f"| {name} | 1 | 2 | 1 | 1 |" in text
    assert "| compute-sanitizer | not run |" in text
    assert (bits(found, 2)["exit_code"], bits(found, 2)["failed"]) == (0, {})


def test_bits_that_differ_where_launches_wait_fail(tmp_path):
    found = bits(records(tmp_path, same=False), 2)
    assert found["exit_code"] == 1
    assert [what.partition(": ")[2] for what in found["failed"]] == ["bits of dp"]


def test_the_test_in_which_a_process_died_is_named(tmp_path):
    failed = records(tmp_path, dies=True, ranks=1)[gpu_checks.named(1)]["failed"]
    assert {test.partition("[")[0]: why for test, why in failed.items()} == {
        "test_a_device.py::test_that_one_rank_fails": "AssertionError: the last rank",
        "test_a_device.py::test_that_dies": "did not end",
    }


def test_no_comparison_is_no_success():
    assert gpu_checks.compared([], 2)["exit_code"] == 1


def test_every_sanitizer_runs_on_few_tests_without_pytorchs_pool_and_all_ranks_are_launched():
    checks = gpu_checks.all_checks("/opt/compute-sanitizer")
    tools = {check.tool[2]: check for check in checks if check.tool}
    assert sorted(tools) == ["initcheck", "memcheck", "racecheck", "synccheck"]
    for check in tools.values():
        command = gpu_checks.command_of(check, Path("tests/gpu"))
        assert command[0] == "/opt/compute-sanitizer"
        assert check.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert "-k" in command
    assert sorted({check.ranks for check in checks}) == [1, 2, 4]
