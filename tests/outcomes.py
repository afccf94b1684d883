"""Note what became of each test while it happens: a pytest plugin for perf/gpu_checks.py, which reads the notes.

Lines of $HPCLLM_TEST_OUTCOMES, one JSON object each, by rank 0, which alone speaks; each written as it comes: a process
that dies in a test leaves that test as started.

    {"test": ..., "outcome": "started" | "passed" | "failed" | "skipped", "why": ...}
    {"test": ..., "fact": NAME, "value": TEXT}      record_property(NAME, TEXT) of the test
    {"warning": TEXT}
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
from mpi4py import MPI

if MPI.COMM_WORLD.rank:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # one rank speaks; what another says when it fails alone is on stderr
PATH = os.environ.get("HPCLLM_TEST_OUTCOMES", "") if MPI.COMM_WORLD.rank == 0 else ""


def note(**words: str) -> None:
    if PATH:
        with Path(PATH).open("a", encoding="utf-8") as file:
            file.write(json.dumps(words) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    note(test=nodeid, outcome="started", why="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        note(test=report.nodeid, outcome=report.outcome, why=why(report))
    if report.when == "teardown":
        for name, value in report.user_properties:
            note(test=report.nodeid, fact=name, value=str(value))


def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    note(warning=str(warning_message.message))


def why(report: pytest.TestReport) -> str:
    """Return the reason of a skip, or the last line that a failure says for itself."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    texts = [text for name, text in report.sections if name.startswith("rank ") and text] or [report.longreprtext]
    said = [line[1:].strip() for line in texts[0].splitlines() if line.startswith("E ")]
    return next(iter(said), texts[0].strip().rpartition("\n")[2])
