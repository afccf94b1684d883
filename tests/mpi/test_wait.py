"""Waits end when the messages are there, or when the limit passes: then with a name."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.errors import StallError
from hpcllm.mpi import wait
from hpcllm.mpi.wait import MOST_BLOCKING_BYTES, JobWaits, Waits


def never() -> str:
    raise AssertionError("the name of a wait that ended well was asked for")


@pytest.fixture
def pending():
    """A receive that nobody sends to."""
    request = MPI.COMM_SELF.Irecv(np.empty(1), 0, 99)
    yield request
    request.Cancel()
    request.Wait()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_is_complete_costs_no_time_and_no_name(count):
    waits = Waits(limit_s=1.0)
    waits.all([MPI.REQUEST_NULL] * count, never)
    assert waits.total_s == 0


@pytest.mark.parametrize("limit_s", [0.05, 0.3])
def test_a_wait_past_its_limit_raises_with_rank_limit_and_name(pending, limit_s):
    waits = Waits(limit_s)
    start = time.perf_counter()
    with pytest.raises(StallError, match=rf"rank 0: waited {limit_s:g} s for a letter; .* raise limits\.stall_s"):
        waits.all([pending], lambda: "a letter")
    spent_s = time.perf_counter() - start
    assert limit_s <= waits.total_s <= spent_s < limit_s + 5


def test_one_message_too_few_is_a_stall(pending):
    with pytest.raises(StallError):
        Waits(0.05).all([MPI.REQUEST_NULL, pending, MPI.REQUEST_NULL], lambda: "two of three")


def test_another_thread_computes_meanwhile(pending):
    """A pure Python loop needs the interpreter's lock, which a wait inside MPI would keep."""
    count = 0

    def work() -> None:
        nonlocal count
        while not done:
            count += 1

    done = False
    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(StallError):
        Waits(0.3).all([pending], lambda: "a letter")
    done = True
    thread.join()
    assert count > 1000


@pytest.mark.parallel([2, 3, 4])
def test_a_late_message_ends_the_wait_and_its_time_is_counted(comm):
    waits, late_s, got = Waits(limit_s=60.0), 0.2, np.zeros(3)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(late_s)
        for peer in range(1, comm.size):
            comm.Send(np.full(3, float(peer)), peer, 5)
    else:
        waits.all([comm.Irecv(got, 0, 5)], never)
        assert np.all(got == comm.rank)
        assert waits.total_s > late_s / 2


def test_a_wait_that_mpi_gives_up_has_a_name_too():
    """By a call that MPI refuses: what a library says of a rank that is gone cannot be had at will."""
    comm = MPI.COMM_SELF.Dup()
    with pytest.raises(
        StallError, match=r"^rank \d+: MPI failed in the wait for the words of rank 5: (?s:.*) be gone$"
    ):
        Waits(5.0).until(lambda: comm.Send(np.zeros(1), 99) is None, lambda: "the words of rank 5")
    comm.Free()


@pytest.fixture
def guarded(monkeypatch):
    """The job's waits as they are while a thread looks at calls that block; it does not run here."""
    job = JobWaits(guarded=True)
    monkeypatch.setattr(wait, "job_waits", job)
    return job


def test_under_a_limit_only_short_calls_of_the_foreground_block_and_only_where_they_are_guarded(guarded):
    for limit_s in (None, 5.0):
        for foreground in (False, True):
            for guarded.guarded in (False, True):
                waits = Waits(limit_s, foreground=foreground)
                short = limit_s is None or (foreground and guarded.guarded)
                assert waits.may_block(0) == waits.may_block(MOST_BLOCKING_BYTES) == short
                assert waits.may_block(MOST_BLOCKING_BYTES + 1) == (limit_s is None)


def test_a_call_that_blocks_is_known_while_it_does_and_its_time_is_counted(guarded):
    waits, seen = Waits(5.0, foreground=True), []

    def call(*arguments):
        time.sleep(0.05)
        seen.append((arguments, [(one.waits, one.what()) for one in guarded.calls.values()]))

    waits.block(lambda: "a letter", call, 1, 2)
    assert seen == [((1, 2), [(waits, "a letter")])]
    assert not guarded.calls
    assert 0.05 <= waits.total_s < 5


def test_a_call_that_mpi_gives_up_has_a_name_and_is_over(guarded):
    comm = MPI.COMM_SELF.Dup()
    with pytest.raises(StallError, match=r"MPI failed in the wait for the words of rank 5: (?s:.*) be gone$"):
        Waits(5.0, foreground=True).block(lambda: "the words of rank 5", comm.Send, np.zeros(1), 99)
    assert not guarded.calls
    comm.Free()


@pytest.mark.parametrize(("device", "longest_s"), [("cpu", 500e-6), ("cuda", 50e-6)])
def test_messages_of_a_device_are_polled_more_often(monkeypatch, device, longest_s):
    slept: list[float] = []
    own, sleep = threading.current_thread(), time.sleep  # threads of earlier tests may sleep, too
    monkeypatch.setattr(time, "sleep", lambda s: (slept.append if threading.current_thread() is own else sleep)(s))
    waits, polls = Waits(limit_s=5.0), iter(range(100))
    waits.poll_for(device)
    waits.until(lambda: next(polls) == 99, never)
    assert max(slept) == longest_s
