"""Jobs run in order, beside the caller where the library allows it, and no failure is lost."""

from __future__ import annotations

import threading
import time

import pytest

from hpcllm.collectives.worker import Worker

WAYS = pytest.mark.parametrize("threaded", [True, False])


def fail(message: str) -> None:
    raise RuntimeError(message)


@WAYS
def test_jobs_run_in_the_order_of_submission_over_many_rounds(threaded):
    worker, done = Worker(threaded=threaded), []
    for round_ in range(5):
        for job in range(20):
            worker.submit(lambda job=job: done.append(job))
        worker.finish()
        assert done == list(range(20)) * (round_ + 1)
    worker.close()


def test_threaded_jobs_run_beside_the_caller_and_one_at_a_time():
    worker, gate, names = Worker(threaded=True), threading.Event(), []
    worker.submit(lambda: gate.wait(10) and names.append(threading.current_thread().name))
    worker.submit(lambda: names.append(threading.current_thread().name))
    assert names == []  # the caller went on, and the second job waits for the first
    gate.set()
    worker.finish()
    worker.close()
    assert len(names) == 2
    assert set(names) != {threading.current_thread().name}
    assert len(set(names)) == 1


def test_without_threads_a_job_is_done_when_submit_returns():
    worker, names = Worker(threaded=False), []
    worker.submit(lambda: names.append(threading.current_thread()))
    assert names == [threading.current_thread()]


@WAYS
def test_the_first_failure_is_raised_by_the_end_of_the_round(threaded):
    worker = Worker(threaded=threaded)

    def round_() -> None:
        worker.submit(lambda: None)
        worker.submit(lambda: fail("first"))
        worker.submit(lambda: fail("second"))
        worker.finish()

    with pytest.raises(RuntimeError, match="first"):
        round_()
    worker.close()


@WAYS
def test_time_is_exposed_only_where_nobody_computed(threaded):
    worker = Worker(threaded=threaded)
    for _ in range(3):
        worker.submit(lambda: time.sleep(0.05))
    time.sleep(0.4)  # the caller computes
    worker.finish()
    worker.close()
    assert worker.exposed_s < 0.1 if threaded else worker.exposed_s >= 0.15


def test_a_worker_that_had_no_job_has_no_thread_to_close():
    before = threading.active_count()
    Worker(threaded=True).close()
    assert threading.active_count() == before
