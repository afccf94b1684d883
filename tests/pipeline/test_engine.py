"""However the model is cut and whatever the schedule: the loss and gradients of one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from mpi4py import MPI

from hpcllm.config import MeshConfig, ModelConfig
from hpcllm.errors import StallError
from hpcllm.mesh import open_mesh
from hpcllm.model.initialisation import build
from hpcllm.model.loss import IGNORED, cross_entropy_sum
from hpcllm.model.shapes import split_layers
from hpcllm.model.transformer import Decoder
from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import Link
from hpcllm.pipeline.schedules import SCHEDULES, forward_only, with_messages
from hpcllm.waiting import Waits

SIZE, LENGTH, SCALE = 2, 9, 0.125
SHAPE = {"layers": 5, "hidden": 24, "heads": 3, "ffn": 40, "vocabulary": 61, "max_sequence": 12}
MODELS = {
    "tied": ModelConfig(**SHAPE),
    "untied": ModelConfig(**SHAPE, tied=False, norm="rmsnorm", positions="rotary", activation="swiglu", biases=False),
}


@dataclass
class Recorded(Link):
    """A link that remembers which buffers it has handed out."""

    seen: set[int] = field(default_factory=set)

    def take(self, way, microbatch):
        buffer = super().take(way, microbatch)
        self.seen.add(buffer.data_ptr())
        return buffer


def samples(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (microbatches, SIZE, LENGTH); some targets do not count."""
    generator = torch.Generator().manual_seed(microbatches)
    tokens = torch.randint(SHAPE["vocabulary"], (microbatches, SIZE, LENGTH + 1), generator=generator)
    targets = tokens[..., 1:].contiguous()
    targets[0, 0, :2] = IGNORED
    return tokens[..., :-1], targets


def stage_of(mesh, model: ModelConfig) -> Engine:
    decoder = build(model, split_layers(model, mesh.pp.size)[mesh.pp.rank], seed=5)
    return Engine(decoder, Recorded(mesh, (SIZE, LENGTH, model.hidden), Waits(limit_s=60.0)))


def actions_of(mesh, schedule, microbatches: int) -> list:
    return list(with_messages(schedule(mesh.pp.rank, mesh.pp.size, microbatches), mesh.pp.rank, mesh.pp.size))


def in_one_process(model: ModelConfig, microbatches: int) -> tuple[float, Decoder]:
    whole = build(model, split_layers(model, 1)[0], seed=5)
    inputs, targets = samples(microbatches)
    loss = cross_entropy_sum(whole(inputs.flatten(0, 1)), targets.flatten(0, 1))
    (SCALE * loss).backward()
    return loss.item(), whole


def gradients(mesh, decoder: Decoder) -> dict[str, torch.Tensor]:
    """By name; of an embedding on both ends the sum over the ends."""
    found = {name: p.grad.clone() for name, p in decoder.named_parameters()}
    if mesh.ends.size > 1 and decoder.model.tied:
        mesh.ends.Allreduce(MPI.IN_PLACE, found["embedding.weight"].numpy())
    return found


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_those_of_one_process(comm, name, schedule):
    model = MODELS[name]
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        for microbatches in range(1, 6):
            engine = stage_of(mesh, model)
            loss = engine.run(actions_of(mesh, SCHEDULES[schedule], microbatches), *samples(microbatches), SCALE)
            want_loss, whole = in_one_process(model, microbatches)
            assert mesh.pp.allreduce(loss) == pytest.approx(want_loss, rel=1e-5)
            want = {key: p.grad for key, p in whole.named_parameters()}
            # a key's bias has no effect on softmax: its gradient is rounding alone, so the whole norm bounds it
            noise = 1e-6 * torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
            for key, gradient in gradients(mesh, engine.decoder).items():
                error = torch.linalg.vector_norm(gradient - want[key])
                assert error <= max(1e-5 * torch.linalg.vector_norm(want[key]), noise), key


@pytest.mark.parallel([1, 2, 3, 4])
def test_gradients_add_up_over_runs_and_the_loss_does_not(comm):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = stage_of(mesh, MODELS["untied"])
        actions = actions_of(mesh, SCHEDULES["1f1b"], 3)
        first = engine.run(actions, *samples(3), SCALE)
        once = gradients(mesh, engine.decoder)
        assert engine.run(actions, *samples(3), SCALE) == first
        for key, gradient in gradients(mesh, engine.decoder).items():
            torch.testing.assert_close(gradient, 2 * once[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_pass_without_gradients_scores_the_same_and_leaves_none(comm):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = stage_of(mesh, MODELS["tied"])
        with torch.no_grad():
            loss = engine.run(actions_of(mesh, forward_only, 4), *samples(4), SCALE)
        assert mesh.pp.allreduce(loss) == pytest.approx(in_one_process(MODELS["tied"], 4)[0], rel=1e-5)
        assert all(p.grad is None for p in engine.decoder.parameters())


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_before_each_backward_pass_its_microbatch_is_announced(comm, schedule):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine, announced = stage_of(mesh, MODELS["tied"]), []
        actions = actions_of(mesh, SCHEDULES[schedule], 4)
        engine.run(actions, *samples(4), SCALE, announced.append)
        assert announced == [action.microbatch for action in actions if action.op is Op.BACKWARD]


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receive_buffers_are_used_again(comm, schedule):
    """Not more than are in use at once, however many steps and, with 1F1B, however many microbatches."""
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = stage_of(mesh, MODELS["untied"])
        for microbatches in (2, 6, 6, 6):
            actions = actions_of(mesh, SCHEDULES[schedule], microbatches)
            before = len(engine.link.seen)
            engine.run(actions, *samples(microbatches), SCALE)
            after = len(engine.link.seen)
        assert after == before
        alive = 6 if schedule == "gpipe" else min(mesh.pp.size - mesh.pp.rank, 6)
        assert after <= alive + 2  # one gradient, and one receive that is on its way early


@pytest.mark.parallel(2)
def test_a_neighbour_that_does_not_come_is_named_and_may_come_late(comm):
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        link = Link(mesh, (1, 2, 3), Waits(limit_s=0.2))
        here, there = (Op.BACKWARD, Op.FORWARD) if mesh.pp.rank == 0 else (Op.FORWARD, Op.BACKWARD)
        peer, kind = 1 - mesh.pp.rank, {Op.BACKWARD: "gradient", Op.FORWARD: "activation"}[here]
        link.receive(here, 7)
        with pytest.raises(StallError, match=rf"the {kind} of microbatch 7 from stage {peer} \(rank {peer}\)"):
            link.take(here, 7)
        comm.Barrier()
        link.send(there, 7, torch.full((1, 2, 3), float(mesh.pp.rank)))
        link.waits.limit_s = 60.0
        assert torch.all(link.take(here, 7) == peer)
        link.finish()


@pytest.mark.parallel([2, 3, 4])
def test_validation_needs_two_receive_buffers_for_any_number_of_microbatches(comm):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = stage_of(mesh, MODELS["untied"])
        with torch.no_grad():
            engine.run(actions_of(mesh, forward_only, 9), *samples(9), SCALE)
        assert len(engine.link.seen) == (2 if mesh.pp.rank > 0 else 0)  # one in use, one on its way
