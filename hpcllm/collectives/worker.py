"""Threads that sum while the caller computes: one for each lane, a kind of traffic that must not queue behind another.

    main thread     B7 ... grads of bucket 0 ready ... bucket 1 ready ...         wait for all
                              | submit                  | submit
    lane "gradients"          [ sum bucket 0      ][ sum bucket 1      ]
    lane "tensor"        [ gather ]      [ gather ]                           at the same time

Jobs of a lane run one after another in the order they were submitted, so every rank of a communicator meets the others
in the same order. Lanes know nothing of each other and must share no communicator: then none can wait for another.
Needs MPI_THREAD_MULTIPLE; where the library gives less, a job runs at once in the calling thread. Threads are joined
when the interpreter ends, which is before MPI does. Jobs on a device run on a stream of the lane's own (streams.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch
from mpi4py import MPI

from hpcllm.collectives.streams import Crossing

T = TypeVar("T")
CPU = torch.device("cpu")
GRADIENTS = "gradients"  # the lane of those who do not ask for another


def can_thread() -> bool:
    """Whether MPI may be called from the worker thread while the main thread calls it too."""
    return MPI.Query_thread() >= MPI.THREAD_MULTIPLE


def run_in_order(job: Callable[[], T], threaded: bool, lane: str = GRADIENTS) -> Future[T]:
    """Run `job` after all earlier ones of its lane, in the lane's thread or, not threaded, before this returns."""
    if threaded:
        return _thread(lane).submit(job)
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass
class Worker:
    """Runs jobs in the lane "gradients"; `finish` waits for all of them and raises what the first failed one raised.

    device: where the jobs compute. What is submitted, waited for and finished in a thread is in order with what the
    thread's current stream is told before and after.
    """

    threaded: bool = field(default_factory=can_thread)
    device: torch.device = CPU
    busy_s: float = 0.0  # seconds in which a job ran
    exposed_s: float = 0.0  # seconds in which nobody computed because a job was not done
    hidden_s: float = 0.0  # seconds of finished jobs behind which the caller computed
    _before_s: float = 0.0  # busy less exposed, when everything was last finished
    _pending: list[Future[None]] = field(default_factory=list)
    _crossings: dict[Future[None], Crossing] = field(default_factory=dict)  # of jobs that the caller's stream is beside
    _failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run job after all earlier ones; what is returned is for `wait`."""
        start = time.perf_counter()
        crossing = Crossing(self.device, GRADIENTS) if self.threaded and self.device.type != "cpu" else None
        future = run_in_order(lambda: self._run(job, crossing), self.threaded)
        self._pending.append(future)
        if crossing:
            self._crossings[future] = crossing
        if not self.threaded:
            self.exposed_s += time.perf_counter() - start
        return future

    def wait(self, future: Future[None]) -> None:
        """Return when that job is done; raises what the first failed one raised."""
        self._wait([future])

    def finish(self) -> None:
        """Return when every job is done; raises what the first failed one raised."""
        self._wait(self._pending)
        self._pending.clear()
        behind_s = self.busy_s - self.exposed_s
        self.hidden_s += max(0.0, behind_s - self._before_s)
        self._before_s = behind_s

    def close(self) -> None:
        """Return when every job is done."""
        wait(self._pending)
        self._pending.clear()
        for crossing in self._crossings.values():
            crossing.back()
        self._crossings.clear()

    def _wait(self, futures: list[Future[None]]) -> None:
        start = time.perf_counter()
        wait(futures)
        self.exposed_s += time.perf_counter() - start
        for future in futures if self._crossings else ():
            crossing = self._crossings.pop(future, None)
            if crossing:
                crossing.back()
        if self._failure:
            raise self._failure

    def _run(self, job: Callable[[], None], crossing: Crossing | None) -> None:
        if self._failure:
            return  # a later job would meet the messages that the failed one left behind
        start = time.perf_counter()
        try:
            crossing.run(job) if crossing else job()
        except BaseException as error:
            self._failure = error
        self.busy_s += time.perf_counter() - start


@cache
def _thread(lane: str) -> ThreadPoolExecutor:
    """Its sums must not bring a second team of OpenMP threads to the cores that the backward pass uses."""
    return ThreadPoolExecutor(1, f"hpcllm {lane}", initializer=lambda: torch.set_num_threads(1))
