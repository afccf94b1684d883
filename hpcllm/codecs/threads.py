"""Work on a large array, shared out among threads that run kernels without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")


def share_out(job: Callable[[int, int], T], count: int, count_a_thread: int) -> list[T]:
    """[job(first, last) for parts of range(count)]: as many as torch has threads, each of count_a_thread at least."""
    parts = max(1, min(torch.get_num_threads(), count // count_a_thread))
    cuts = [count * part // parts for part in range(parts + 1)]
    others = [_threads().submit(job, first, last) for first, last in pairwise(cuts[1:])]
    return [job(cuts[0], cuts[1]), *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    """Made when a first array is large enough. The threads run kernels only, never torch."""
    return ThreadPoolExecutor(os.cpu_count(), "codecs")
