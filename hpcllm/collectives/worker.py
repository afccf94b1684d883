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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mpi4py import MPI


@dataclass
class Worker:
    """Runs jobs in order; `finish` waits for all of them and raises what a job raised."""

    threaded: bool = field(default_factory=lambda: MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
    busy_s: float = 0.0  # in jobs
    exposed_s: float = 0.0  # of which nobody computed meanwhile
    _thread: ThreadPoolExecutor | None = None
    _pending: list[Future[None]] = field(default_factory=list)

    def submit(self, job: Callable[[], None]) -> None:
        if not self.threaded:
            self._timed(job)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collectives")
        self._pending.append(self._thread.submit(self._timed, job))

    def finish(self) -> None:
        """Return when every job is done; raises the first failed job's exception."""
        start = time.perf_counter()
        for job in self._pending:
            job.result()
        self._pending.clear()
        if self.threaded:
            self.exposed_s += time.perf_counter() - start

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown()

    def _timed(self, job: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            job()
        finally:
            spent_s = time.perf_counter() - start
            self.busy_s += spent_s
            if not self.threaded:
                self.exposed_s += spent_s
