"""One thread that sums while the backward pass still runs.

    main thread     B7 ... grads of bucket 0 ready ... bucket 1 ready ...         wait for all
                              | submit                  | submit
    worker thread             [ sum bucket 0      ][ sum bucket 1      ]

Jobs run one after another in the order they were submitted, so every rank of a communicator meets the others in the
same order. Needs MPI_THREAD_MULTIPLE; where the library gives less, a job runs at once in the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from mpi4py import MPI


@dataclass
class Worker:
    """Runs jobs in order; `finish` waits for all of them and raises what the first failed one raised."""

    threaded: bool = field(default_factory=lambda: MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
    exposed_s: float = 0.0  # seconds in which nobody computed because a job was not done
    _thread: ThreadPoolExecutor | None = None
    _pending: list[Future[None]] = field(default_factory=list)
    _failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self.threaded:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "collectives", initializer=_one_thread)
            self._pending.append(self._thread.submit(self._run, job))
        else:
            start = time.perf_counter()
            self._run(job)
            self.exposed_s += time.perf_counter() - start

    def finish(self) -> None:
        """Return when every job is done; raises what the first failed one raised."""
        start = time.perf_counter()
        wait(self._pending)
        self._pending.clear()
        self.exposed_s += time.perf_counter() - start
        if self._failure:
            raise self._failure

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown()

    def _run(self, job: Callable[[], None]) -> None:
        if self._failure:
            return  # a later job would meet the messages that the failed one left behind
        try:
            job()
        except BaseException as error:
            self._failure = error


def _one_thread() -> None:
    """Sums must not bring a second team of OpenMP threads to the cores that the backward pass uses."""
    torch.set_num_threads(1)
