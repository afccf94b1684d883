"""Order of host threads for the pretend device: what came before a job, and before the end of it.

    submit(job)  --clock-->  job in the executor's thread  --clock-->  future.result(), wait(futures)

Whoever uses what another thread told the device, or an event that it recorded, without one of these, is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def watch(native: Any) -> None:
    """Patch concurrent.futures in this process. Once; before anyone imports `wait` from there."""
    submit, result, wait = ThreadPoolExecutor.submit, Future.result, futures.wait

    def watched_submit(executor: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before, box = native.release(), []

        def run() -> Any:
            native.begin_thread()
            native.acquire(before)
            try:
                return job(*args, **kwargs)
            finally:
                box.append(native.release())

        future: Any = submit(executor, run)
        future._pretend_box = box
        return future

    def learn(future: Any) -> None:
        for clock in getattr(future, "_pretend_box", ()):
            native.acquire(clock)

    def watched_result(future: Any, timeout: float | None = None) -> Any:
        try:
            return result(future, timeout)
        finally:
            if future.done():
                learn(future)

    def watched_wait(awaited: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        found = wait(awaited, *args, **kwargs)
        for future in found.done:
            learn(future)
        return found

    ThreadPoolExecutor.submit, Future.result, futures.wait = watched_submit, watched_result, watched_wait  # type: ignore[method-assign,assignment]
