"""A real srun puts ranks where `hpcllm layout` says that it does. Started by run.sh."""

from __future__ import annotations

import pytest
from slurm_commands import slurm

from hpcllm.plan.rank_order.slots import Slots, rank_lists

NODES = 2
SLOTS = [Slots(8, 4), Slots(12, 6)]


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_each_distribution_fills_the_slots_as_claimed(slots: Slots) -> None:
    for option, claimed in rank_lists(slots).items():
        command = ["srun", "--mpi=none", f"--nodes={NODES}", f"--ntasks-per-node={slots.per_node}"]
        command += [f"--distribution={option}", "sh", "-c", "echo $SLURM_NODEID $SLURM_LOCALID $SLURM_PROCID"]
        seen = sorted(tuple(map(int, line.split())) for line in slurm(*command).splitlines())
        assert [rank for _, _, rank in seen] == claimed, option
        assert [node for node, _, _ in seen] == slots.nodes.tolist(), option
