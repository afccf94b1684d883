"""Collective errors: what fails on one rank is raised on all ranks before any goes on.

    on_root                rank 0 runs a function, all ranks get the result, or the same exception
    on_all                 all ranks run a function; if any failed, all raise and name the failed ranks
    raise_if_any_failed    all ranks did something; if any failed, all raise and name the failed ranks

A lone exception would leave the other ranks inside a collective until the job's time limit. Only names and messages
of errors travel, never the objects: the other side looks the type up among ours. comm = None is a process alone: no MPI
is started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from hpcllm import errors
from hpcllm.mpi.rank_names import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def on_root(comm: MPI.Intracomm | None, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and broadcast its (small) result, or its error. Collective over comm.

    Files and folders are examined this way, so that ten thousand ranks do not send the file system the same request
    and cannot get different answers.
    """
    if comm is None:
        return function()
    result, report = None, None
    if comm.rank == 0:
        try:
            result = function()
        except (errors.HpcllmError, OSError) as error:
            report = _report(error)
    from hpcllm.mpi.wait import WORK, meet  # starts MPI

    # rank 0 has done its work, the others wait while it may still be at it
    meet(comm, "to come to the same point, rank 0 with an answer", 1.0 if comm.rank == 0 else WORK)
    answer: T
    answer, report = comm.bcast((result, report), root=0)
    if report:
        raise _rebuild(*report)
    return answer


def on_all(comm: MPI.Intracomm | None, function: Callable[[], T]) -> T:
    """Run `function`, which must not communicate, on every rank; if it fails on any, raise on all. Collective."""
    result, failure = None, None
    try:
        result = function()
    except Exception as error:  # of any type: the others must not wait for this rank
        failure = error
    raise_if_any_failed(comm, failure)
    return cast(T, result)


def rank_and_size(comm: MPI.Intracomm | None) -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) for a process alone."""
    return (comm.rank, comm.size) if comm else (0, 1)


def raise_if_any_failed(comm: MPI.Intracomm | None, error: Exception | None) -> None:
    """Raise on every rank if any rank passes an error; a rank's own error is chained. Collective over comm."""
    if comm is None:
        if error:
            raise error
        return
    from hpcllm.mpi.wait import WORK, job_waits, together  # starts MPI

    failures = np.array([error is not None], dtype=np.int32)
    job_waits.waits(WORK).allreduce(comm, failures, lambda: "all ranks to say how it went")
    if not failures[0]:
        return
    report = _report(error) if error else None
    reports = together(comm, "to tell what failed", lambda: comm.allgather(report))
    failed = [(rank, *report) for rank, report in enumerate(reports) if report]
    by_message: dict[str, list[int]] = {}
    for rank, _, text in failed:
        by_message.setdefault(text, []).append(rank)
    lines = "; ".join(f"{name_ranks(ranks, 3)}: {text}" for text, ranks in list(by_message.items())[:3])
    kinds = {kind for _, kind, _ in failed}
    message = f"{len(failed)} of {comm.size} ranks failed: {lines}{'; ...' if len(by_message) > 3 else ''}"
    raise _rebuild(kinds.pop() if len(kinds) == 1 else "CollectiveError", message) from error


def _report(error: Exception) -> tuple[str, str]:
    ours = isinstance(error, errors.HpcllmError)
    return (type(error).__name__, str(error)) if ours else ("CollectiveError", f"{type(error).__name__}: {error}")


def _rebuild(kind: str, message: str) -> errors.HpcllmError:
    exception: errors.HpcllmError = getattr(errors, kind)(message)
    exception.everywhere = True
    return exception
