"""GRPO: the gradient of a plain loss, on every layout; texts that follow from seeds; a run that goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI
from pytest_mpi.parallel_assert import parallel_assert
from reward_runs import begin, by_length, curve, grpo, train_grpo
from small_checkpoints import stored_tensors
from small_runs import dividing

from hpcllm.errors import MeshError
from hpcllm.finetuning.grpo import Grpo
from hpcllm.finetuning.policy_loss import FIGURES, PolicyLoss, advantages
from hpcllm.finetuning.rollouts import generate
from hpcllm.inference.complete import make_batch
from hpcllm.model.loss import IGNORED
from hpcllm.training.setup import open_run

REWARD, LENGTH, KL = (2 + FIGURES.index(name) for name in ("reward", "length", "kl"))  # columns of a curve
LAYOUTS = [
    {},
    {"mesh": {"pp": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2, "sequence_parallel": True}, "finetuning": {"reward": {"kl": 0.1}}},
    {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"recompute": "selective"}},
    {"optimizer": {"shard": "states+gradients"}, "finetuning": {"reward": {"scaled": True}}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}, "finetuning": {"reward": {"kl": 0.1}}},
    {"finetuning": {"adapter": {"rank": 2}, "reward": {"kl": 0.1}}},
]


@pytest.mark.parametrize("shape", [(1, 2), (3, 9), (5, 40)])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_paper(shape, kl):
    generator = torch.Generator().manual_seed(sum(shape))
    nats = (2 * torch.rand(shape, generator=generator)).requires_grad_()
    sampled, reference = torch.rand(2, *shape, generator=generator)
    better, is_target = torch.randn(shape[0], generator=generator), (sampled > 0.3).float()
    of_texts = torch.rand(shape[0], 4, generator=generator)
    largest = []
    loss = PolicyLoss(is_target, better, of_texts, sampled, reference if kl else None, kl, largest)
    found = loss(nats)
    wide, divergence = nats.detach().double().requires_grad_(), 0.0
    wanted = 0 * wide.sum()  # there may be no target
    for b, t in is_target.nonzero().tolist():
        log_p, old = -wide[b, t], -wide[b, t].detach()
        apart = -reference[b, t].double() - log_p
        k3 = torch.exp(apart) - apart - 1
        wanted = wanted - better[b].double() * torch.exp(log_p - old) + kl * k3
        divergence += k3.item() if kl else 0.0
    assert found[0].item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
    (ours,) = torch.autograd.grad(3 * found[0], nats)
    (plain,) = torch.autograd.grad(3 * wanted, wide)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)
    figures = dict(zip(FIGURES, found[1:].tolist(), strict=True))
    assert [figures[name] for name in FIGURES[:4]] == pytest.approx(of_texts.sum(0).tolist(), rel=1e-6)
    assert figures["kl"] == pytest.approx(divergence, rel=1e-4, abs=1e-5)
    assert figures["entropy"] == pytest.approx((nats * is_target).sum().item(), rel=1e-5)
    away = ((nats - sampled).abs() * is_target).detach()
    assert figures["sampler_difference"] == pytest.approx(away.sum().item(), rel=1e-5)
    assert [x.item() for x in largest] == [away.max().item()]


@pytest.mark.parametrize("shape", [(1, 2), (3, 9), (6, 100)])
def test_the_first_ratio_is_exactly_1(shape):
    nats = 20 * torch.rand(shape, generator=torch.Generator().manual_seed(1))
    ones, nothing = torch.ones(shape), torch.zeros(shape[0], 4)
    for advantage in (1.0, -2.0):
        loss = PolicyLoss(ones, torch.full(shape[:1], advantage), nothing, nats, None, 0.0, [])
        assert loss(nats)[0].item() == -advantage * nats.numel()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("samples", [2, 3, 8])
def test_advantages_compare_texts_of_one_prompt(scaled, samples):
    draw = np.random.default_rng(samples)
    rewards = draw.choice([0.0, 0.1, 0.7], 12 * samples)
    rewards[:samples] = 0.1  # a mean of it is another number, for some counts
    found = advantages(rewards, samples, scaled).reshape(-1, samples)
    for group, of_group in zip(rewards.reshape(-1, samples), found, strict=True):
        assert of_group.sum() == pytest.approx(0, abs=1e-12)
        is_alike = len(set(group)) == 1
        assert (of_group == 0).all() or not is_alike
        if not is_alike:
            spread = group.std() if scaled else 1.0
            assert of_group == pytest.approx((group - group.mean()) / spread)
    shifted = advantages(3.0 + rewards, samples, scaled).reshape(-1, samples)
    np.testing.assert_allclose(shifted, found, atol=1e-12)


def plain_gradients(config) -> dict[str, np.ndarray]:
    """Gradients of GRPO as PyTorch does it: each text alone, the loss over all of them, in one process."""
    objective = Grpo(config.finetuning.reward, by_length)
    with open_run(config, MPI.COMM_SELF, objective) as run:
        begin(run)
        batch = run.loader.take(0)
        texts = list(zip(batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1), strict=True))
        rewards = np.array([text["reward"] for text in objective._texts])
        decoder = run.engine.chunks[0].decoder
        decoder.gradient_sums = None
        reward, samples = config.finetuning.reward, config.finetuning.reward.samples
        total, count = torch.zeros(()), 0
        for number, (inputs, targets) in enumerate(texts):
            group = rewards[number // samples * samples :][:samples]
            better = (rewards[number] - group.mean()) / (group.std() or 1.0 if reward.scaled else 1.0)
            chosen = targets != IGNORED
            end = int(chosen.nonzero().max()) + 1
            log_p = torch.log_softmax(decoder(inputs[None, :end])[0], -1)[chosen[:end]]
            log_p = log_p.gather(1, targets[chosen].unsqueeze(1))
            total, count = total - (better * log_p).sum(), count + len(log_p)
        (total / count).backward()  # of the k3 of weights that are the reference it is 0
        return {name: p.grad.numpy() for name, p in run.parameters.items()}


def first_step(config, comm) -> dict[str, np.ndarray]:
    """Gradients of the first step: its first moments tell them, as global tensors. Collective over comm."""
    config = comm.bcast(config)
    train_grpo(config, comm, by_length)
    path = Path(config.run.folder) / config.run.name / "checkpoints" / "step_00000001.h5"
    with h5py.File(path) as file:
        found = {}
        file["optimizer/exp_avg"].visititems(
            lambda name, item: (
                found.update({name: item[()] / (1 - config.optimizer.beta1)})
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_gradients_are_those_of_a_plain_loss_in_one_process(comm, tables, monkeypatch):
    monkeypatch.setattr("hpcllm.finetuning.grpo.SHOWN_TEXTS", 1000)
    tables = dividing(tables, comm.size)
    once = {"run": {"steps": 1}, "optimizer": {"clip_norm": 0.0}}
    alone = {name: keys for name, keys in tables.items() if name == "finetuning"}
    config = grpo(**_merged(once, alone))  # on all ranks, which make store and weights together
    want = plain_gradients(config) if comm.rank == 0 else None
    found = first_step(grpo(**_merged(once, tables)), comm)
    want = comm.bcast(want)
    scale = max(np.abs(gradient).max() for gradient in want.values())
    parallel_assert(scale > 1e-3)
    parallel_assert(set(found) == set(want))
    for name, gradient in want.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-5 * max(1.0, scale), err_msg=name)


def _merged(*tables):
    """Tables of several, each of which may have some keys of one table."""
    found: dict[str, dict] = {}
    for each in tables:
        for name, keys in each.items():
            found[name] = found.get(name, {}) | dict(keys)
    return found


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_texts_and_figures_are_those_of_one_process(comm, tables):
    """Nothing diverges in these steps: no draw lies so near to a border that rounding moves it across."""
    tables = dividing(tables, comm.size)
    alone = {name: keys for name, keys in tables.items() if name == "finetuning"}
    config = grpo(**alone)  # on all ranks, which make store and weights together
    one = comm.bcast(curve(config, MPI.COMM_SELF, 4) if comm.rank == 0 else None)
    found = curve(grpo(**tables), comm, 4)
    parallel_assert(len(set(one.samples)) == 4)
    parallel_assert(found.samples == one.samples)
    parallel_assert(max(found.difference, one.difference) <= 1e-5)
    np.testing.assert_allclose(found.figures, one.figures, rtol=1e-4, atol=2e-5)
    assert found.held_out == pytest.approx(one.held_out)
    parallel_assert(found.figures[0, KL] == 0 or not tables)
    parallel_assert(0 < one.figures[0, LENGTH] <= 8)


@pytest.mark.parallel([2])
def test_weights_have_come_from_the_other_ranks_before_texts_are_written(comm, monkeypatch):
    """Updates and gathers belong to training: made behind a text they would be made in inference mode."""
    under_way = []

    def writes(run, *rest):
        before = len(run.optimizer.weights._gathers)

        def makes(*words):
            under_way.append((before, len(run.optimizer.weights._gathers)))
            return make_batch(*words)

        monkeypatch.setattr("hpcllm.finetuning.rollouts.make_batch", makes)
        return generate(run, *rest)

    monkeypatch.setattr("hpcllm.finetuning.grpo.generate", writes)
    train_grpo(grpo(run={"steps": 3}, optimizer={"shard": "states"}), comm, by_length)
    parallel_assert(any(before for before, _ in under_way), "no gather is under way at the end of a step")
    parallel_assert(not any(after for _, after in under_way))


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_a_run_that_goes_on_writes_the_same_bits(comm, kl):
    config = comm.bcast(
        grpo(
            run={"steps": 4},
            finetuning={"reward": {"kl": kl}},
            checkpoint={"every_steps": 2, "keep": 9},
            mesh={"pp": 2} if comm.size == 2 else {},
        )
    )
    last = Path(config.run.folder) / config.run.name / "checkpoints" / "step_00000004.h5"
    train_grpo(config, comm, by_length)
    whole = stored_tensors(last)
    comm.Barrier()
    if comm.rank == 0:
        last.unlink()
    comm.Barrier()
    train_grpo(config, comm, by_length)
    parallel_assert(stored_tensors(last) == whole)


def test_what_is_rewarded_becomes_more_frequent():
    def no_space(_, rows):
        return [float(" " not in row.text) for row in rows]

    config = grpo(run={"steps": 25}, optimizer={"learning_rate": 1e-2, "warmup_steps": 2})
    summary = train_grpo(config, MPI.COMM_SELF, no_space)
    assert summary.validation.figures["reward"] == 1.0
    assert summary.validation.loss == -1.0


@pytest.mark.parallel([2])
@pytest.mark.parametrize("tables", [{"data": {"global_batch": 4}}, {"data": {"global_batch": 12}}], ids=str)
def test_groups_that_would_be_cut_are_rejected(comm, tables):
    config = comm.bcast(grpo(**tables))
    with pytest.raises(MeshError, match=r"finetuning\.reward\.samples = 4 does not divide"):
        train_grpo(dataclasses.replace(config), comm, by_length)
