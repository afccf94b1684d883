"""Agree on a plan: every rank learns what it writes or reads, and for whom, in few messages on however many ranks.

    plan.py    holders --> planner of a dataset --> owners of its blocks --> holders     each: (rank, what it is told)
               then all learn which datasets there are

What is told travels by the bits of the distance to whom it is for, so that a rank sends ceil(log2 ranks) messages, not
one to each other rank, each with all that goes the same way:

    6 ranks, rank 0 has something for rank 5      round 0   what has bit 0 in its distance goes 1 on     0 -> 1
    distance 5 = 1 + 4                            round 1                bit 1                2 on
                                                  round 2                bit 2                4 on       1 -> 5

What all are to know, each tells 1, 2, 4 .. on with all that it knows by then. A message is a length, then pickled words
of control; no tensor. Works without MPI: comm=None.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", section 3.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcllm.checkpoint import plan as planning
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.plan import Plan
from hpcllm.checkpoint.slabs import Slab
from hpcllm.mpi.collective_errors import on_all, rank_and_size

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def make_plan(
    comm: MPI.Intracomm | None, specs: Mapping[str, DatasetSpec], slabs: Sequence[Slab], *, exactly_once: bool
) -> Plan:
    """Agree on who writes or reads which block. Collective over comm.

    specs: of at least the datasets of this rank's slabs. exactly_once: the slabs of all ranks hold every element of
    every dataset once, as in writing; the plan's specs are then those of all ranks. Raises CheckpointError on all.
    """
    on_all(comm, lambda: planning.check_slabs(specs, slabs))
    used = {slab.dataset for slab in slabs}
    specs = {name: spec for name, spec in specs.items() if exactly_once or name in used}
    rank, ranks = rank_and_size(comm)
    requests = deliver(comm, planning.requests(specs, slabs, rank, ranks))
    assigned = on_all(comm, lambda: list(planning.assign_all(requests, exactly_once=exactly_once)))
    tasks = planning.in_file_order(deliver(comm, assigned))
    remote = planning.by_turn(deliver(comm, planning.remote_parts(tasks, rank)))
    if exactly_once:
        specs = share(comm, {request.name: request.spec for request in requests})
    return Plan(rank, dict(sorted(specs.items())), tuple(slabs), tasks, remote)


def deliver(comm: MPI.Intracomm | None, told: Iterable[tuple[int, T]]) -> list[T]:
    """Deliver things to ranks: returns those for this one, in the order of the ranks that sent them. Collective.

    told: (rank, thing); things for one rank arrive in their order here. Raises StallError.
    """
    if comm is None:
        return [thing for _, thing in told]
    travelling = [((to - comm.rank) % comm.size, comm.rank, thing) for to, thing in told]
    for step in _steps(comm.size):
        leaving = [(distance - step, source, thing) for distance, source, thing in travelling if distance & step]
        staying = [each for each in travelling if not each[0] & step]
        travelling = staying + _swap(comm, step, leaving)
    return [thing for _, _, thing in sorted(travelling, key=lambda each: each[1])]


def share(comm: MPI.Intracomm | None, known: dict[str, T]) -> dict[str, T]:
    """Union of what all ranks know. Collective. Raises StallError."""
    for step in _steps(comm.size) if comm else ():
        assert comm is not None
        known = known | _swap(comm, step, known)
    return known


def _steps(ranks: int) -> Iterator[int]:
    """1, 2, 4 .. below the number of ranks."""
    return (1 << bit for bit in range((ranks - 1).bit_length()))


def _swap(comm: MPI.Intracomm, step: int, words: T) -> T:
    """Send words `step` ranks on, and return those from as many ranks back."""
    from hpcllm.mpi.wait import WORK, job_waits, name_rank  # starts MPI

    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    waits = job_waits.waits(WORK)
    data = np.frombuffer(pickle.dumps(words), np.uint8)
    length, coming = np.array([data.size], np.int64), np.empty(1, np.int64)

    def both(sent: np.ndarray, received: np.ndarray) -> None:
        pending = [comm.Irecv(received, source), comm.Isend(sent, to)]
        waits.all(pending, lambda: f"its share of a plan from {name_rank(comm, source)}")

    both(length, coming)
    found = np.empty(int(coming[0]), np.uint8)
    both(data, found)
    answer: T = pickle.loads(found.data)
    return answer
