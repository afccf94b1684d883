"""What ranks tell one another reaches whom it is for, in order, in few messages; then all have the same plan."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_mpi import parallel_assert

from hpcllm.checkpoint.agreement import deliver, make_plan, share
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import Slab, uncovered
from hpcllm.errors import CheckpointError

SIZES = [1, 2, 3, 4, 5]


class CountingComm:
    """A communicator that counts what is sent."""

    def __init__(self, comm) -> None:
        self.comm, self.messages, self.bytes = comm, 0, 0

    def __getattr__(self, name: str):
        return getattr(self.comm, name)

    def Isend(self, values, to):  # noqa: N802 - of MPI
        self.messages += 1
        self.bytes += values.nbytes
        return self.comm.Isend(values, to)


def told_by(rank: int, ranks: int, seed: int) -> list[tuple[int, tuple[int, int, int]]]:
    """Random things for random ranks, itself and nobody at all among them: (to whom, (from whom, to whom, number))."""
    rng = np.random.default_rng([seed, rank])
    to = rng.integers(ranks, size=int(rng.integers(40)) * int(rng.integers(2)))
    return [(int(one), (rank, int(one), number)) for number, one in enumerate(to)]


@pytest.mark.parallel(SIZES)
def test_each_rank_gets_what_is_for_it_in_the_order_of_those_who_sent_it(comm):
    for seed in range(20):
        found = deliver(comm, told_by(comm.rank, comm.size, seed))
        told = [thing for rank in range(comm.size) for _, thing in told_by(rank, comm.size, seed)]
        parallel_assert(found == [thing for thing in told if thing[1] == comm.rank])


def test_a_process_alone_tells_itself():
    assert deliver(None, [(0, "a"), (0, "b")]) == ["a", "b"]
    assert share(None, {"a": 1}) == {"a": 1}


@pytest.mark.parallel(SIZES)
def test_all_know_what_any_knew(comm):
    known = share(comm, {f"{comm.rank}.{n}": n for n in range(comm.rank % 3)})
    parallel_assert(known == {f"{rank}.{n}": n for rank in range(comm.size) for n in range(rank % 3)})


@pytest.mark.parallel(SIZES)
def test_a_plan_takes_so_many_messages_whatever_is_planned(comm):
    """Four rounds of ceil(log2 ranks) messages and their lengths: nothing is sent to each other rank."""
    counting = CountingComm(comm)
    specs = {f"model/{n}": DatasetSpec((40, 6), "float32") for n in range(30)}
    cut = [rank * 40 // comm.size for rank in range(comm.size + 1)]
    slabs = [Slab(name, (cut[comm.rank], 0), (cut[comm.rank + 1] - cut[comm.rank], 6)) for name in specs]
    plan = make_plan(counting, specs, slabs, exactly_once=True)
    parallel_assert(counting.messages == 4 * 2 * (comm.size - 1).bit_length())
    parallel_assert(plan.specs == specs)
    owned = comm.allgather([task.box for task in plan.tasks])
    for name, spec in specs.items():
        parallel_assert(uncovered(spec.shape, [box for each in owned for box in each if box.dataset == name]) is None)


@pytest.mark.parallel([2, 3, 4])
def test_ranks_that_disagree_all_hear_of_it(comm):
    spec = DatasetSpec((4 + (comm.rank == 1),), "float32")
    slabs = [Slab("w", (0,), (4,))] if comm.rank == 0 else []
    with pytest.raises(CheckpointError, match="ranks disagree on w"):
        make_plan(comm, {"w": spec}, slabs, exactly_once=True)
