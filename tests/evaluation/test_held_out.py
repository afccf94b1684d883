"""The held-out loss is that of the whole model on every sample once, on any layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import tiny
from torch.nn import functional

from hpcllm.config.schema import Config
from hpcllm.evaluation.held_out import Validation, validate
from hpcllm.training.setup import RunContext, open_run

LAYOUTS = [{}, {"pp": 2}, {"tp": 2}, {"dp": 2, "pp": 2}, {"dp": 1, "pp": 2, "tp": 2}]


def scored(config: Config, comm: MPI.Intracomm) -> tuple[Validation, RunContext]:
    """Held-out loss of the initial weights, which do not depend on the layout."""
    with open_run(config, comm) as run:
        found = validate(run.config, run.mesh, run.store, run.engine, run.control)
        assert found is not None
        return found, run


@pytest.mark.parametrize("samples", [1, 7, 12, 13])
def test_it_is_the_mean_of_the_losses_of_all_tokens_and_counts_their_bytes(samples):
    found, run = scored(tiny(data={"validation_sequences": samples, "document_mask": False}), MPI.COMM_SELF)
    length, tokens = run.config.data.sequence_length, run.store.tokens("validation")
    rows = np.stack([tokens[k * length : (k + 1) * length + 1] for k in range(samples)]).astype(np.int64)
    inputs, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
    with torch.no_grad():
        logits = run.engine.chunks[-1].decoder(inputs)
    nats = functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum").item()
    assert found.samples == samples
    assert found.loss == pytest.approx(nats / targets.numel(), rel=1e-5)
    text_bytes = run.store.token_bytes[targets.numpy()].sum()
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_every_layout_gives_the_result_of_one_process(comm, mesh):
    if comm.size % math.prod(mesh.values()):
        mesh = {"dp": comm.size}
    one, _ = scored(tiny(data={"validation_sequences": 13}), MPI.COMM_SELF)
    found, _ = scored(tiny(data={"validation_sequences": 13}, mesh={**mesh, "dp": 0}), comm)
    assert (found.samples, found.loss) == (one.samples, pytest.approx(one.loss, rel=1e-5))
    assert found.bits_per_byte == pytest.approx(one.bits_per_byte, rel=1e-5)
