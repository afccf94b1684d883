"""DPO: the loss of the paper, on every layout, from a reference that is computed once."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI
from preference_runs import curve, dpo, train_dpo
from small_checkpoints import stored_tensors
from small_runs import dividing
from torch.nn import functional

from hpcllm.errors import ConfigError
from hpcllm.finetuning.objectives import objective_of
from hpcllm.finetuning.preferences import FIGURES, PairLoss
from hpcllm.finetuning.reference import FILE
from hpcllm.model.loss import IGNORED
from hpcllm.training.resume import resume
from hpcllm.training.setup import open_run

ACCURACY = 2 + FIGURES.index("rewards/accuracies")  # column of a curve
LAYOUTS = [
    {},
    {"mesh": {"pp": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2, "sequence_parallel": True}, "pipeline": {"loss_tokens": 50}},
    {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"recompute": "selective"}},
    {"optimizer": {"shard": "all"}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}},
]


@pytest.mark.parametrize("shape", [(1, 2), (3, 9), (5, 40)])
@pytest.mark.parametrize("beta", [0.03, 0.5])
def test_loss_and_gradient_are_those_of_the_paper(shape, beta):
    generator = torch.Generator().manual_seed(sum(shape))
    nats = (2 * torch.rand(shape, generator=generator)).requires_grad_()
    ends = torch.randint(1, shape[1], shape[:1], generator=generator).float()
    reference = -shape[1] * torch.rand(shape[0], 2, generator=generator)
    counts = (torch.arange(shape[0]) != 1).float()
    found = PairLoss(ends, reference, counts, beta)(nats)
    wide, wanted = nats.detach().double().requires_grad_(), torch.zeros(1 + len(FIGURES), dtype=torch.float64)
    for b in np.flatnonzero(counts):
        end = int(ends[b])
        chosen, rejected = -wide[b, :end].sum(), -wide[b, end:].sum()
        of_chosen, of_rejected = beta * (chosen - reference[b, 0]), beta * (rejected - reference[b, 1])
        margin = of_chosen - of_rejected
        loss = -torch.log(1 / (1 + torch.exp(-margin)))
        wanted = wanted + torch.stack([loss, of_chosen, of_rejected, (margin > 0).double(), margin, chosen, rejected])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    (ours,) = torch.autograd.grad(3 * found[0], nats)
    (plain,) = torch.autograd.grad(3 * wanted[0], wide)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)


def test_the_reference_is_each_answer_read_alone_and_the_first_step_begins_there():
    config = dpo()
    with open_run(config, MPI.COMM_SELF, objective_of(config)) as run:
        resume(run)
        rows, decoder, known = run.loader.rows, run.engine.chunks[0].decoder, run.objective.reference["train"]
        assert 0 < rows.count < rows.pairs == len(known)
        assert np.isnan(known).all(1).sum() == rows.pairs - rows.count
        for row in range(0, rows.count, 7):
            for answer, (start, length, counted) in enumerate(rows.pieces(row)):
                tokens = torch.from_numpy(rows.split.tokens[start : start + length + 1].astype(np.int64))
                targets = tokens[1:].masked_fill(~torch.from_numpy(rows.split.counts(start + 1, counted)), IGNORED)
                with torch.no_grad():
                    logits = decoder(tokens[:length].unsqueeze(0))[0].double()
                want = -functional.cross_entropy(logits, targets, reduction="sum").item()
                assert known[rows.numbers[row], answer] == pytest.approx(want, rel=1e-5)
    loss, _, chosen, rejected, _, margin = curve(config, MPI.COMM_SELF, 1)[0, :6]
    assert loss == pytest.approx(math.log(2), rel=1e-6)
    np.testing.assert_allclose((chosen, rejected, margin), 0, atol=1e-6)  # a row among others has other last bits


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_losses_and_rewards_are_those_of_one_process(comm, tables):
    data = {"global_batch": 24}  # two microbatches on 4 replicas
    one = curve(dpo(data=data), MPI.COMM_SELF, 4)
    assert one[3, 0] < 0.99 * one[0, 0]
    found = curve(dpo(data=data, **dividing(tables, comm.size)), comm, 4)
    equal = np.ones_like(one, dtype=bool)
    equal[0, ACCURACY] = False  # margins are 0 but for rounding
    np.testing.assert_allclose(found[equal], one[equal], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "damaged"])
def test_a_run_goes_on_with_the_same_bits(lost, capsys):
    config = dpo(run={"steps": 4}, checkpoint={"every_steps": 2, "keep": 9})
    folder = Path(config.run.folder) / config.run.name
    train_dpo(config, MPI.COMM_SELF)
    last, reference = folder / "checkpoints" / "step_00000004.h5", folder / FILE
    whole, kept, written_ns = stored_tensors(last), pairs_of(reference), reference.stat().st_mtime_ns
    last.unlink()
    if lost:
        damage(reference)
    capsys.readouterr()
    train_dpo(config, MPI.COMM_SELF)
    assert stored_tensors(last) == whole
    told = capsys.readouterr().out
    assert ("computed anew" in told.replace("\n", " ")) == lost
    assert ("computing the reference" in told) == lost
    assert (reference.stat().st_mtime_ns == written_ns) != lost
    assert pairs_of(reference) == kept


def test_a_longer_run_computes_what_it_lacks_and_other_weights_all(capsys, tmp_path):
    config = dpo(run={"steps": 2})
    reference = Path(config.run.folder) / config.run.name / FILE
    with h5py.File(began(config, reference)) as file:
        few = file["train"][()]
    assert 0 < np.isfinite(few).all(1).sum() <= 24  # pairs of two steps
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=20))
    with h5py.File(began(longer, reference)) as file:
        known = np.isfinite(few)
        assert (file["train"][()][known] == few[known]).all()
        assert np.isfinite(file["train"][()]).sum() > known.sum()
        unlike = file["train"][()]
    shutil.copytree(config.run.start_from, tmp_path / "other")
    (weights_file,) = (tmp_path / "other").glob("*.safetensors")
    flip(weights_file, weights_file.stat().st_size - 2)
    other = dataclasses.replace(longer, run=dataclasses.replace(longer.run, start_from=str(tmp_path / "other")))
    capsys.readouterr()
    with h5py.File(began(other, reference)) as file:
        assert not np.array_equal(file["train"][()], unlike, equal_nan=True)
    assert "other weights; the reference is computed anew" in capsys.readouterr().out.replace("\n  ", " ")


def began(config, reference: Path) -> Path:
    """Begin a run, without a step; returns the path of its reference."""
    with open_run(config, MPI.COMM_SELF, objective_of(config)) as run:
        resume(run)
    return reference


def test_it_prefers_what_it_has_not_seen():
    summary = train_dpo(dpo(run={"steps": 40}, log={"validation_every_steps": 5}), MPI.COMM_SELF)
    assert summary.validation.loss < 0.4
    assert summary.validation.figures["rewards/accuracies"] >= 0.9
    assert summary.validation.figures["rewards/margins"] > 0.5


@pytest.mark.parametrize("wrong", [{"data": {"document_mask": False}}, {"run": {"start_from": ""}}], ids=str)
def test_keys_that_do_not_go_together_are_rejected(wrong):
    with pytest.raises(ConfigError, match=r"finetuning\.kind = 'dpo'"):
        began(dpo(**wrong), Path())


def pairs_of(path: Path) -> list[bytes]:
    """The log-probabilities of both splits."""
    with h5py.File(path) as file:
        return [file[split][()].tobytes() for split in ("train", "validation")]


def damage(path: Path) -> None:
    """Flip a bit of the log-probabilities."""
    with h5py.File(path) as file:
        place = file["train"].id.get_offset()
    flip(path, place + 2)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
