"""Collectives that run while the caller computes: iallreduce(...) and so on return a Handle.

    handle = iallreduce(x, comm, "int8")     every rank starts those of a lane in the same order, whatever their
    ...compute, x is not touched...          communicators: one thread a lane runs one after another (worker.py)
    x = handle.wait()

On a communicator each lane has messages and memory of its own, so that a blocking collective, or one of another lane,
may run there at the same time; a lane's first one on a communicator is collective. Where MPI gives less than
MPI_THREAD_MULTIPLE they run at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

from mpi4py import MPI

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives import operations
from hpcllm.collectives.arrays import Array, device_of
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.two_level import prepare
from hpcllm.collectives.worker import GRADIENTS, Crossing, can_thread, run_in_order, used_here

Communicator = MPI.Intracomm | Group


@dataclass
class Handle:
    """A collective under way."""

    _future: Future[Array]
    _crossing: Crossing | None = None  # of an array on a device
    _kept: Array | None = None  # that array: the job may be over while its stream still reads it

    def done(self) -> bool:
        """True if wait() would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> Array:
        """Wait for the array that the blocking form returns, and return it; raises what the collective raised.

        On a device it is complete for what the current stream is told from now on.
        """
        result = self._future.result()
        if self._crossing:
            self._crossing.back()
            self._kept = None  # what gets its memory now is told to the device after the job
            used_here(result)
        return result


class Options(TypedDict, total=False):
    """Options of all nonblocking collectives, as those of the blocking ones; lane: see worker.py."""

    out: Array | None
    lane: str


def iallreduce(
    x: Array, comm: Communicator, codec: str | Codec = "raw", algorithm: str = "auto", **options: Unpack[Options]
) -> Handle:
    """Start operations.allreduce in the background."""
    return _start(operations.allreduce, x, comm, codec=codec, algorithm=algorithm, **options)


def ireduce_scatter(
    x: Array, comm: Communicator, codec: str | Codec = "raw", algorithm: str = "auto", **options: Unpack[Options]
) -> Handle:
    """Start operations.reduce_scatter in the background."""
    return _start(operations.reduce_scatter, x, comm, codec=codec, algorithm=algorithm, **options)


def iallgather(
    part: Array, comm: Communicator, codec: str | Codec = "raw", algorithm: str = "auto", **options: Unpack[Options]
) -> Handle:
    """Start operations.allgather in the background."""
    return _start(operations.allgather, part, comm, codec=codec, algorithm=algorithm, **options)


def ialltoall(
    x: Array, comm: Communicator, codec: str | Codec = "raw", algorithm: str = "auto", **options: Unpack[Options]
) -> Handle:
    """Start operations.alltoall in the background."""
    return _start(operations.alltoall, x, comm, codec=codec, algorithm=algorithm, **options)


def ibroadcast(
    x: Array,
    comm: Communicator,
    root: int = 0,
    codec: str | Codec = "raw",
    algorithm: str = "auto",
    *,
    lane: str = GRADIENTS,
) -> Handle:
    """Start operations.broadcast in the background."""
    return _start(operations.broadcast, x, comm, lane, root=root, codec=codec, algorithm=algorithm)


def _start(
    operation: Callable[..., Array], x: Array, comm: Communicator, lane: str = GRADIENTS, **options: Any
) -> Handle:
    group = group_of(comm)
    background = group.background(lane)
    device = device_of(x)
    prepare(background, on_cpu=device.type == "cpu")
    # MPI's own wait would keep a core from the thread that computes: poll, if need be without a limit
    background.wire.waits.limit_s = math.inf if group.wire.waits.limit_s is None else group.wire.waits.limit_s
    background.wire.waits.observer = group.wire.waits.observer
    job = partial(operation, x, background, **options)
    if device.type == "cpu" or not can_thread():
        return Handle(run_in_order(job, can_thread(), lane))
    crossing = Crossing(device, lane)
    return Handle(run_in_order(partial(crossing.run, job), True, lane), crossing, x)
