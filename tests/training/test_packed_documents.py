"""Training on packed documents: the loss of each document alone, on every layout, and the same bits after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_checkpoints import stored_tensors
from small_runs import fitted, losses, run_steps, tiny
from torch.nn import functional

from hpcllm.config.schema import to_tables
from hpcllm.system.job import StopSignals
from hpcllm.training import saving
from hpcllm.training.compatibility import BEFORE_MASKS
from hpcllm.training.loop import train
from hpcllm.training.setup import open_run

LAYOUTS = [
    {"mesh": {"pp": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2, "sequence_parallel": True}},
    {"optimizer": {"shard": "all"}},
    {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"recompute": "selective"}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}},
]
HOW = [{"packing": "stream"}, {"packing": "best-fit"}]


def packed(data, **tables):
    """A run whose rows hold several pieces each, and unequal numbers of targets."""
    sizes = {"sequence_length": 400, "global_batch": 12}
    learning = {"learning_rate": 3e-3, "warmup_steps": 5} | tables.pop("optimizer", {})
    cut = {"microbatches": 3} | tables.pop("pipeline", {})
    base = tiny().data
    store = {"store": base.store, "validation_sequences": 3}
    return tiny(
        model={"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44, "max_sequence": 400},
        data=store | sizes | data,
        optimizer=learning,
        pipeline=cut,
        **tables,
    )


@pytest.mark.parametrize("data", HOW, ids=str)
def test_the_loss_of_a_step_is_the_mean_over_documents_read_alone(data):
    config = packed(data)
    with open_run(config, MPI.COMM_SELF) as run:
        rows, nats, count = run.loader.rows, 0.0, 0
        decoder = run.engine.chunks[0].decoder
        pieces = [piece for at in range(12) for piece in rows.pieces(run.loader.sampler.index(at))]
        for start, length, counted in pieces:
            tokens = torch.from_numpy(rows.split.tokens[start : start + length + 1].astype(np.int64))
            with torch.no_grad():
                logits = decoder(tokens[:length].unsqueeze(0))[0, :counted].double()
            nats += functional.cross_entropy(logits, tokens[1 : counted + 1], reduction="sum").item()
            count += counted
        assert len(pieces) > 12
        assert count < 12 * rows.sequence
        assert run_steps(run, 1)[0, 0] == pytest.approx(nats / count, rel=1e-5)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("data", HOW, ids=str)
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_one_process(comm, data, tables):
    one = losses(packed(data), MPI.COMM_SELF, 3)
    found = losses(packed(data, **fitted(tables, comm.size)), comm, 3)
    np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.parametrize("data", [{"document_mask": False}, {"packing": "best-fit"}], ids=str)
def test_a_run_goes_on_as_it_was_begun_with_the_same_bits(data, monkeypatch):
    """The record of a run of an older version has no such keys; then the defaults of today are not taken."""
    config = packed(
        data, run={"name": str(data), "steps": 4, "folder": tiny().run.folder}, checkpoint={"every_steps": 2, "keep": 9}
    )
    if "packing" not in data:
        older = {"data": {k: v for k, v in to_tables(config)["data"].items() if k not in BEFORE_MASKS}}
        monkeypatch.setattr(saving, "to_tables", lambda config: to_tables(config) | older)
    folder = Path(config.run.folder) / config.run.name
    with StopSignals() as signals:
        train(config, MPI.COMM_SELF, signals, restart=True)
        last = folder / "checkpoints" / "step_00000004.h5"
        whole = stored_tensors(last)
        last.unlink()
        again = config if "packing" in data else dataclasses.replace(config, data=packed({}).data)
        train(again, MPI.COMM_SELF, signals)
    assert stored_tensors(last) == whole
