"""Weights that are gathered for their use: MPI sees no address of memory that is freed, nobody a shard that changes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import small_runs
from pytest_mpi import parallel_assert
from small_runs import tiny

from hpcllm.mpi import buffers
from hpcllm.optim.weights import Zero3Weights
from hpcllm.training.setup import open_run

STEPS = 2


@pytest.mark.pretend("open")
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_messages_never_lie_in_memory_that_is_freed(comm, codec, monkeypatch):
    """The losses are those of the CPU; the first step is exact, so that weights travel raw in it with any codec."""
    elastic: list[Zero3Weights] = []
    seen = set()

    def note(start):
        def begin(group, memory, peer, tag):
            owners = (array.untyped_storage() for weights in elastic for array in weights.arrays)
            seen.add(any(s.data_ptr() <= memory.data_ptr() < s.data_ptr() + s.nbytes() for s in owners))
            return start(group, memory, peer, tag)

        return begin

    for name in ("isend", "irecv"):
        monkeypatch.setattr(buffers, name, note(getattr(buffers, name)))
    tables = {"optimizer": {"shard": "all"}, "precision": {"compute": "fp32"}}
    wire = {"bucket_mib": 0.02, "exact_steps": 1, "parameters": codec, "gpu_aware": "yes"}
    losses = {}
    for device in ("gpu", "cpu"):
        config = tiny(**tables, run={"device": device}, communication=wire)
        with open_run(config, comm) as run:
            assert isinstance(run.optimizer.weights, Zero3Weights)
            elastic[:] = [run.optimizer.weights] if device == "gpu" else []
            losses[device] = small_runs.run_steps(run, STEPS)
            elastic.clear()
    parallel_assert(seen == {False})
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=1e-5)


@pytest.mark.pretend
@pytest.mark.parallel([2])
def test_shards_that_travel_are_not_read_from_a_checkpoint(comm):
    """A head without an embedding beside it fetches the first block ahead; the fixture no_races asks for the order."""
    reach = {"gpu_aware": "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no"}
    with open_run(tiny(optimizer={"shard": "all"}, communication=reach), comm) as run:
        assert isinstance(run.optimizer.weights, Zero3Weights)
        run.optimizer.weights.gather("blocks.0")
        for piece in run.optimizer.pieces_to_read():
            piece.values.zero_()
        run.optimizer.loaded(0)
