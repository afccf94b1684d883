"""Blocks worked on by a few threads ahead of who takes them: checksums, Zstandard and reads need no GIL.

items     0 1 2 3 4 5 6 7 ...
threads       . . . . .          taken in order: 1 was the last, 2 is next; no more than a few wait
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 16  # a file system gives no more to one process, and each holds a few blocks


def ahead(work: Callable[[T], R], items: Iterable[T], ranks: int = 1) -> Iterator[R]:
    """work(item) of each item, in their order; at most two a thread are done or begun and not yet taken.

    ranks: of the job, for a share of this process's cores. What `work` raises comes where its result would have.
    """
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
