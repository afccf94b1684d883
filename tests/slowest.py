"""Note how long each test took: a pytest plugin that tests/run.sh loads, which prints the slowest of all groups.

Lines of $HPCLLM_TEST_TIMES: seconds of set-up, call and teardown, the group, the test.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

KEPT = 20
times_s: defaultdict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    times_s[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("HPCLLM_TEST_TIMES")
    if path and not hasattr(session.config, "workerinput"):  # xdist's workers report to the process that speaks
        group = os.environ.get("HPCLLM_TEST_GROUP", "")
        slowest = sorted(times_s.items(), key=lambda row: -row[1])[:KEPT]
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{spent_s:8.2f} s  {group:13} {name}\n" for name, spent_s in slowest)
