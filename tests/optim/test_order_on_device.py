"""Sums and gathers in the background never meet the passes and updates beside them: see fixture no_races."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import losses, run_steps, tiny

from hpcllm.collectives import group
from hpcllm.training.setup import RunContext

pytestmark = pytest.mark.pretend
REACH = {"gpu_aware": "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no", "bucket_mib": 0.02}
STEPS = 3
BF16 = {"precision": {"compute": "bf16"}}
CASES: dict[str, dict[str, Any]] = {
    "whole": {"pipeline": {"microbatches": 2}},
    "whole, late sums": {"communication": {"gradients": "bf16"}},
    "ZeRO-1": {"optimizer": {"shard": "states"}, **BF16},
    "ZeRO-1, differences": {"optimizer": {"shard": "states"}, "communication": {"parameters": "bf16"}},
    "ZeRO-1, states on the host": {"optimizer": {"shard": "states", "offload": True}, **BF16},
    "ZeRO-2": {"optimizer": {"shard": "states+gradients"}, "pipeline": {"microbatches": 2}, **BF16},
    "ZeRO-3": {"optimizer": {"shard": "all"}, "pipeline": {"microbatches": 2}, **BF16},
    "ZeRO-3, recomputed": {"optimizer": {"shard": "all"}, "pipeline": {"recompute": "full"}},
}


def weights_of(run: RunContext) -> list[torch.Tensor]:
    """Copies of the weights on the host, as far as they are whole."""
    is_whole = run.config.optimizer.shard != "all"
    return [weight.detach().cpu() for weight in run.parameters.values() if is_whole]


@pytest.mark.parallel([2])
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_looked_at_between_its_steps_is_the_run_that_is_not(comm, monkeypatch, case):
    """By a validation, by a checkpoint that is written, and by one that is read: the same losses, to the bit."""
    if "late" in case:  # sums come in two halves between nodes; one machine has no more than one
        make_group = group.make_group
        monkeypatch.setattr(group, "make_group", lambda comm, _=None: make_group(comm, MPI.COMM_SELF))
    tables = CASES[case]
    config = tiny(**{**tables, "communication": {"exact_steps": 1, **REACH, **tables.get("communication", {})}})

    def looked_at(run: RunContext) -> np.ndarray:
        seen = []
        for step in range(STEPS):
            seen.append(run_steps(run, 1, first=step))
            look = (run.optimizer.pieces_to_read, run.optimizer.pieces_to_write)[step % 2]
            pieces = [piece.values.cpu().clone() for piece in look()]
            run.optimizer.settle()
            assert all(torch.equal(before, piece.values.cpu()) for before, piece in zip(pieces, look(), strict=True))
            settled = weights_of(run)
            run.objective.validate(run)
            assert all(map(torch.equal, settled, weights_of(run)))
            run.optimizer.loaded(run.optimizer.updates)
        return np.concatenate(seen)

    np.testing.assert_array_equal(losses(config, comm, 0, looked_at), losses(config, comm, STEPS))
