"""Supervised fine-tuning: the loss of each answer read alone, on every layout, with the same bits after a resume."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pytest_mpi.parallel_assert import parallel_assert
from small_chats import base, chats, finetuning, folder_of, run
from small_runs import fitted
from torch.nn import functional

from hpcllm.checkpoint.diff import difference
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.data.packing import SplitArrays, make_rows
from hpcllm.data.store import TokenStore
from hpcllm.errors import ConfigError
from hpcllm.inference.generate import load_decoder

LAYOUTS = [
    {"mesh": {"pp": 2}},
    {"mesh": {"tp": 2}},
    {"optimizer": {"shard": "all"}},
    {"mesh": {"tp": 2, "pp": 2}},
    {"mesh": {"tp": 2, "sequence_parallel": True}, "optimizer": {"shard": "states"}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1", "recompute": "selective"}},
]
TEMPLATES = ["chatml", "llama3", "mistral", "plain"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_first_loss_is_the_mean_over_the_answers_of_conversations_read_alone(template):
    """Packed equals unpacked: a decoder of the checkpoint reads each conversation by itself."""
    store = TokenStore.open(chats(template))
    with Checkpoint.open(base(template)) as checkpoint:
        decoder = load_decoder(checkpoint)
    nats, count, documents = 0.0, 0, store.documents("train").tolist()
    for first, end in pairwise(documents):
        tokens = torch.from_numpy(store.tokens("train")[first:end].astype(np.int64))
        counted = torch.from_numpy(store.counted_of("train", first, end))[1:]
        with torch.no_grad():
            logits = decoder(tokens[:-1].unsqueeze(0))[0].double()
        nats += functional.cross_entropy(logits[counted], tokens[1:][counted], reduction="sum").item()
        count += int(counted.sum())
    rows = make_rows(SplitArrays.of(store, "train"), 400, "best-fit", True).count
    assert 2 * rows < len(documents)
    assert count == store.header.counted["train"] < store.header.tokens["train"] / 2
    batch = {"global_batch": rows}
    config = finetuning(
        template, run={"name": f"first {template}", "steps": 1}, data=batch, pipeline={"microbatches": 1}
    )
    [record] = run(config, MPI.COMM_SELF)
    assert record["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert record["targets"] == count


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_losses_are_those_of_one_process(comm, tables, packing):
    tables = fitted(tables, comm.size)
    name = f"{comm.size} {packing} {LAYOUTS.index(tables) if tables in LAYOUTS else 'dp'}"
    alone = finetuning(run={"name": f"{name} alone"}, data={"packing": packing})
    together = finetuning(run={"name": f"{name} together"}, data={"packing": packing}, **tables)
    want = comm.bcast(run(alone, MPI.COMM_SELF, restart=True) if comm.rank == 0 else None)
    found = run(together, comm, restart=True)
    keys = ("loss", "grad_norm", "targets")
    np.testing.assert_allclose(*([[each[key] for key in keys] for each in steps] for steps in (found, want)), rtol=1e-5)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_run_that_goes_on_writes_the_same_bits(comm, packing):
    """The last checkpoints of one start, and of two, are the same to `checkpoint diff`."""
    name = {"name": f"again {comm.size} {packing}"}
    config = finetuning(
        run=name, data={"packing": packing}, checkpoint={"every_steps": 2, "keep": 9}, pipeline={"microbatches": 2}
    )
    run(config, comm, restart=True)
    last = folder_of(config) / "checkpoints" / "step_00000004.h5"
    if comm.rank == 0:
        last.rename(last.parent.parent / "first.h5")
    comm.Barrier()
    run(config, comm)
    with Checkpoint.open(last.parent.parent / "first.h5") as whole, Checkpoint.open(last) as again:
        parallel_assert(difference(whole, again).is_none)


@pytest.mark.parametrize("changed", [{"kind": "none"}, {"adapter": {"rank": 2}}], ids=str)
def test_a_run_goes_on_as_the_fine_tuning_that_it_was(changed):
    config = finetuning(run={"name": "the same"}, checkpoint={"every_steps": 2})
    run(config, MPI.COMM_SELF, restart=True)
    other = finetuning(run={"name": "the same", "steps": 6}, finetuning={"kind": "supervised"} | changed)
    with pytest.raises(ConfigError, match=r"was trained otherwise: finetuning\."):
        run(other, MPI.COMM_SELF)


def test_a_run_on_text_counts_every_token_and_says_so(capsys, monkeypatch):
    from small_runs import store

    monkeypatch.setenv("COLUMNS", "200")
    data = {"store": str(store()), "sequence_length": 100}
    config = finetuning("plain", run={"name": "on text", "start_from": "", "steps": 1}, data=data)
    run(config, MPI.COMM_SELF, restart=True)
    assert "supervised fine-tuning on text" in capsys.readouterr().out
