"""Communicators whose blocking collectives have a name and a limit.

    comm.bcast(x)    all ranks of comm are here?  --- yes ---> MPI's own bcast
                       | not yet: a polite wait (wait.py), WORK times the job's limit
                       `- past it: "ranks 0-3 to come to bcast (prepare.py:125)", and who has not come

By itself a blocking collective waits for ever, on a core of its own, and says nothing. A command gets its world as a
MeetingComm (system/job.py), and what is made of one by Dup or Split is one as well. For control words only: the
barrier before costs some microseconds. `plain` gives the same communicator without it, for what is timed and for
traffic that comes seldom enough to have words and limits of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.mpi.wait import WORK, meet

WORDS = "allgather allreduce alltoall barrier bcast exscan gather reduce scan scatter"
BUFFERS = (
    "Allgather Allgatherv Allreduce Alltoall Alltoallv Alltoallw Barrier Bcast Exscan Gather Gatherv Reduce "
    "Reduce_scatter Reduce_scatter_block Scan Scatter Scatterv"
)
COLLECTIVES = f"{WORDS} {BUFFERS}".split()
MAKERS = ["Create", "Dup", "Dup_with_info", "Split", "Split_type"]  # of communicators; collective as well


class MeetingComm(MPI.Intracomm):
    """Communicator that calls a blocking collective once all its ranks have come to it. Raises StallError."""


def plain(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the same communicator, whose collectives are MPI's bare ones."""
    return MPI.Intracomm(comm)


def _meeting(name: str) -> Callable[..., Any]:
    collective, is_maker = getattr(MPI.Intracomm, name), name in MAKERS

    def method(self: MeetingComm, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1)
        meet(self, f"to come to {name} ({Path(caller.f_code.co_filename).name}:{caller.f_lineno})", WORK)
        result = collective(self, *arguments, **keywords)
        return MeetingComm(result) if is_maker else result

    return method


for _name in (*COLLECTIVES, *MAKERS):
    setattr(MeetingComm, _name, _meeting(_name))
