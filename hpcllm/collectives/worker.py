"""One thread a process that sums while the caller computes.

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
from functools import lru_cache
from typing import TypeVar

import torch
from mpi4py import MPI

T = TypeVar("T")


def can_thread() -> bool:
    """Whether MPI may be called from the worker thread while the main thread calls it too."""
    return MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def run_in_order(job: Callable[[], T], threaded: bool) -> Future[T]:
    """Run `job` after all earlier ones, in the worker thread or, not threaded, before this returns."""
    if threaded:
        return _thread().submit(job)
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass
class Worker:
    """Runs jobs in order; `finish` waits for all of them and raises what the first failed one raised."""

    threaded: bool = field(default_factory=can_thread)
    exposed_s: float = 0.0  # seconds in which nobody computed because a job was not done
    _pending: list[Future[None]] = field(default_factory=list)
    _failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        start = time.perf_counter()
        self._pending.append(run_in_order(lambda: self._run(job), self.threaded))
        if not self.threaded:
            self.exposed_s += time.perf_counter() - start

    def finish(self) -> None:
        """Return when every job is done; raises what the first failed one raised."""
        start = time.perf_counter()
        self.close()
        self.exposed_s += time.perf_counter() - start
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Return when every job is done."""
        wait(self._pending)
        self._pending.clear()

    def _run(self, job: Callable[[], None]) -> None:
        if self._failure:
            return  # a later job would meet the messages that the failed one left behind
        try:
            job()
        except BaseException as error:
            self._failure = error


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    """Its sums must not bring a second team of OpenMP threads to the cores that the backward pass uses."""
    return ThreadPoolExecutor(1, "collectives", initializer=lambda: torch.set_num_threads(1))
