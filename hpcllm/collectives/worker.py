"""Threads that sum while the caller computes: one for each lane, a kind of traffic that must not queue behind another.

    main thread     B7 ... grads of bucket 0 ready ... bucket 1 ready ...         wait for all
                              | submit                  | submit
    lane "gradients"          [ sum bucket 0      ][ sum bucket 1      ]
    lane "tensor"        [ gather ]      [ gather ]                           at the same time

Jobs of a lane run one after another in the order they were submitted, so every rank of a communicator meets the others
in the same order. Lanes know nothing of each other and must share no communicator: then none can wait for another.
Needs MPI_THREAD_MULTIPLE; where the library gives less, a job runs at once in the calling thread. Threads are joined
when the interpreter ends, which is before MPI does.

Jobs on a device run on a stream of the lane's own, in order with what the caller tells the device before and after:

    caller's stream   k0  k1 |                    | k4 ...      told before: the job waits for it
                             `-> event     event -'             told after the caller has waited: waits for the job
    lane's stream               | job: k2  k3 |                 beside whatever the caller tells it meanwhile

Streams and events are torch's own, of any kind of device. On the CPU none of this is needed, and none is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from mpi4py import MPI

from hpcllm.system.device import recorded

T = TypeVar("T")
CPU = torch.device("cpu")
GRADIENTS = "gradients"  # the default lane
MEANWHILE_S = 50e-6  # as Waits sleep between two polls for a device's messages
HIGH_PRIORITY = -1  # others wait for what a lane computes, which is little, so it goes before the caller's kernels
_streams: dict[tuple[str, torch.device], torch.Stream] = {}  # by lane


def can_thread() -> bool:
    """True if MPI may be called from the worker thread while the main thread calls it too."""
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
    meanwhile: Callable[[], None] | None = None  # called again and again by who waits, as Link.advance is to be
    busy_s: float = 0.0  # seconds in which a job ran
    exposed_s: float = 0.0  # seconds in which nobody computed because a job was not done
    hidden_s: float = 0.0  # seconds of finished jobs behind which the caller computed
    _before_s: float = 0.0  # busy - exposed when everything was last finished
    _pending: list[Future[None]] = field(default_factory=list)
    _crossings: dict[Future[None], Crossing] = field(default_factory=dict)
    _failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run job after all earlier ones; `wait` takes the future that this returns."""
        if self.threaded:
            crossing = None if self.device.type == "cpu" else Crossing(self.device, GRADIENTS)
            future = _thread(GRADIENTS).submit(self._run, job, crossing)
            if crossing:
                self._crossings[future] = crossing
        else:
            start = time.perf_counter()
            future = run_in_order(lambda: self._run(job, None), threaded=False)
            self.exposed_s += time.perf_counter() - start
        self._pending.append(future)
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
        if self.meanwhile:
            while wait(futures, MEANWHILE_S).not_done:
                self.meanwhile()
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


@dataclass
class Crossing:
    """Order between one job on the lane's stream and the caller's stream. Made by the caller."""

    device: torch.device
    lane: str
    _before: torch.Event = field(init=False)
    _after: torch.Event | None = None

    def __post_init__(self) -> None:
        self._before = recorded(self.device)

    def run(self, job: Callable[[], T]) -> T:
        """Run the job in the lane's thread, on the lane's stream."""
        torch.accelerator.set_device_index(self.device)  # a new thread starts with device 0
        key = self.lane, self.device
        stream = _streams.get(key) or _streams.setdefault(key, torch.Stream(self.device, priority=HIGH_PRIORITY))
        self._before.wait(stream)
        with stream:
            try:
                return job()
            finally:
                self._after = recorded(self.device)

    def back(self) -> None:
        """Let the caller's stream go on after the job, which has been waited for."""
        if self._after is not None:
            self._after.wait(torch.accelerator.current_stream(self.device))
            self._after = None


def used_here(result: Any) -> Any:
    """Return a tensor whose memory was taken on another stream, from now on used on this one too."""
    if isinstance(result, torch.Tensor) and not result.is_cpu:
        result.record_stream(torch.accelerator.current_stream(result.device))
    return result


@cache
def _thread(lane: str) -> ThreadPoolExecutor:
    """The thread of a lane; it starts no second team of OpenMP threads on the cores that the backward pass uses."""
    return ThreadPoolExecutor(1, f"hpcllm {lane}", initializer=lambda: torch.set_num_threads(1))
