"""Ranks fail together: what one rank finds out, all ranks know before anyone goes on.

    on_root        rank 0 does it, everyone gets the result, or the same exception
    raise_together everyone did it; if anyone failed, everyone raises and names who

A lone exception would leave the other ranks inside a collective until the job's time limit. Only names and messages
of errors travel, never the objects: the other side looks the type up among ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from hpcllm import errors

T = TypeVar("T")


def on_root(comm: MPI.Intracomm, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and broadcast its (small) result, or its error. Collective over comm.

    Files and folders are looked at this way, so that ten thousand ranks do not ask the file system the same question
    and cannot get different answers.
    """
    result, report = None, None
    if comm.rank == 0:
        try:
            result = function()
        except (errors.HpcllmError, OSError) as error:
            report = _report(error)
    answer: T
    answer, report = comm.bcast((result, report), root=0)
    if report:
        raise _rebuild(*report)
    return answer


def raise_together(comm: MPI.Intracomm, error: Exception | None) -> None:
    """Raise on every rank if any rank brings an error; a rank's own error is chained. Collective over comm."""
    reports = comm.allgather(_report(error) if error else None)
    failed = [(rank, *report) for rank, report in enumerate(reports) if report]
    if not failed:
        return
    lines = "; ".join(f"rank {rank}: {message}" for rank, _, message in failed[:3])
    kinds = {kind for _, kind, _ in failed}
    message = f"{len(failed)} of {comm.size} ranks failed: {lines}{'; ...' if len(failed) > 3 else ''}"
    raise _rebuild(kinds.pop() if len(kinds) == 1 else "CollectiveError", message) from error


def _report(error: Exception) -> tuple[str, str]:
    ours = isinstance(error, errors.HpcllmError)
    return (type(error).__name__, str(error)) if ours else ("CollectiveError", f"{type(error).__name__}: {error}")


def _rebuild(kind: str, message: str) -> errors.HpcllmError:
    exception: errors.HpcllmError = getattr(errors, kind)(message)
    exception.everywhere = True
    return exception
