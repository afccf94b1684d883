"""Tests on many ranks fail together: a pytest plugin that tests/run.sh loads.

    rank 0   test ok   ---+                         one rank failed, all arrive: the test fails on all of them,
    rank 1   test FAILS --+-> meet -> next test     rank 0 shows the failing rank's traceback, the next test starts
    rank 2   test ok   ---+

    rank 0   test waits for rank 1 ....             the failing rank waits GRACE_S for the others, prints its
    rank 1   test FAILS -----> meet ....            traceback and ends the job: nobody hangs in a collective

Ranks meet after set-up, call and teardown of each test, on a communicator of this file's own. A rank that hangs without
a failure is ended by pytest-timeout.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator

import pytest
from mpi4py import MPI

GRACE_S = 10.0
meeting = MPI.COMM_WORLD.Dup()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker of this number of ranks known, though no test that was selected may carry it."""
    config.addinivalue_line("markers", f"parallel[{meeting.size}]: runs on {meeting.size} ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if meeting.size > 1:
        share(report)
    return report


def share(report: pytest.TestReport) -> None:
    """Make a failure on any rank a failure on every rank. Collective; ends the job if a failing rank is alone."""
    mine, answer = bytearray([report.failed]), bytearray(1)  # both must live until the request is done
    request = meeting.Iallreduce(mine, answer, op=MPI.BOR)
    start = time.monotonic()
    while not request.Test():
        if report.failed and time.monotonic() - start > GRACE_S:
            give_up(report)
        time.sleep(0.001)
    if answer[0]:
        spread(report)


def spread(report: pytest.TestReport) -> None:
    texts = meeting.allgather(report.longreprtext if report.failed else "")
    failed = [rank for rank, text in enumerate(texts) if text]
    report.outcome = "failed"
    report.longrepr = f"failed on ranks {', '.join(map(str, failed))} of {meeting.size}"
    report.sections[:0] = [(f"rank {rank}", texts[rank]) for rank in failed]


def give_up(report: pytest.TestReport) -> None:
    print(
        f"\nrank {meeting.rank}: {report.nodeid} failed here; the other ranks did not end the test within {GRACE_S:g} s"
        f"\n{report.longreprtext}",
        file=sys.stderr,
        flush=True,
    )
    MPI.COMM_WORLD.Abort(1)
