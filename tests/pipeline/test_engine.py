"""However the model is cut and whatever the schedule: the loss and gradients of one process, in the memory promised."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from dataclasses import dataclass, field

import pytest
import torch
from mpi4py import MPI
from torch.multiprocessing.reductions import StorageWeakRef

from hpcllm.collectives import group_of
from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.errors import StallError
from hpcllm.model.initialisation import allocate_chunks, build, initialise
from hpcllm.model.loss import IGNORED, cross_entropy_sum
from hpcllm.model.shapes import StageSpan, shard_of, split_layers
from hpcllm.model.tensor_parallel import ALONE, TensorParallel, has_partial_gradient, tensor_parallel
from hpcllm.model.transformer import Decoder
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.actions import COMPUTE, Action, Op, Placement, other_end
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.chunk import Chunk
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.link import BACKWARD, FORWARD, Link
from hpcllm.pipeline.schedules import SCHEDULES, Schedule, forward_only, make_schedule
from hpcllm.pipeline.timing import simulate

SIZE, LENGTH, SCALE = 2, 10, 0.125
SHAPE = {"layers": 12, "hidden": 24, "heads": 4, "ffn": 40, "vocabulary": 61, "max_sequence": 12}
MODELS = {
    "tied": ModelConfig(**SHAPE),
    "untied": ModelConfig(**SHAPE, tied=False, norm="rmsnorm", positions="rotary", activation="swiglu", biases="none"),
}
KINDS = [(name, chunks) for name, kind in SCHEDULES.items() for chunks in ((1, 2, 3) if kind.any_chunks else (None,))]
KINDS.append(("mixed", None))
EVERY_SHAPE = bool(os.environ.get("HPCLLM_EVERY_SHAPE"))  # the whole campaign: minutes instead of seconds


def microbatches_of(ranks: int) -> list[int]:
    return list(range(1, 10)) if EVERY_SHAPE else sorted({1, ranks, 2 * ranks + 1})


def mixed(ranks: int, microbatches: int) -> Schedule:
    """1F1B in which every other backward pass comes in two halves, the second of them as late as it can."""
    plain = make_schedule("1f1b", ranks, microbatches)
    halves = {Action(Op.BACKWARD, m): Action(Op.BACKWARD_INPUT, m) for m in range(0, microbatches, 2)}
    late = tuple(Action(Op.BACKWARD_WEIGHT, half.microbatch) for half in halves.values())
    rows = tuple((*(halves.get(action, action) for action in row), *late) for row in plain.actions)
    return Schedule("mixed", plain.placement, microbatches, rows)


@functools.cache
def schedule_of(kind: tuple[str, int | None], ranks: int, microbatches: int) -> Schedule:
    name, chunks = kind
    schedule = mixed(ranks, microbatches) if name == "mixed" else make_schedule(name, ranks, microbatches, chunks)
    check(schedule)
    return schedule


@dataclass
class Recorded(Link):
    """A link that remembers which buffers it has handed out."""

    seen: set[int] = field(default_factory=set)

    def take(self, action):
        buffer = super().take(action)
        self.seen.add(buffer.data_ptr())
        return buffer


@functools.cache
def samples(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (microbatches, SIZE, LENGTH); some targets do not count."""
    generator = torch.Generator().manual_seed(microbatches)
    tokens = torch.randint(SHAPE["vocabulary"], (microbatches, SIZE, LENGTH + 1), generator=generator)
    targets = tokens[..., 1:].contiguous()
    targets[0, 0, :2] = IGNORED
    return tokens[..., :-1], targets


def build_chunks(
    model: ModelConfig, spans: list[StageSpan], tp: TensorParallel = ALONE, dtype: torch.dtype = torch.float32
) -> list[Decoder]:
    decoders = allocate_chunks(model, spans, tp, dtype)
    for decoder in decoders:
        initialise(decoder, model, 5, tp)
    return decoders


def engine_of(
    mesh, model: ModelConfig, placement: Placement, tp: TensorParallel = ALONE, dtype: torch.dtype = torch.float32
) -> Engine:
    spans = split_layers(model, placement.stages)
    mine = [spans[placement.stage(mesh.pp.rank, chunk)] for chunk in range(placement.chunks)]
    link = Recorded(mesh, placement, (SIZE, LENGTH // tp.parts, model.hidden), Waits(limit_s=60.0), dtype=dtype)
    return Engine([Chunk(decoder) for decoder in build_chunks(model, mine, tp, dtype)], link)


@functools.cache
def in_one_process(name: str, microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    whole = build(MODELS[name], split_layers(MODELS[name], 1)[0], seed=5)
    inputs, targets = samples(microbatches)
    loss = cross_entropy_sum(whole(inputs.flatten(0, 1)), targets.flatten(0, 1))
    (SCALE * loss).backward()
    return loss.item(), {key: p.grad for key, p in whole.named_parameters()}


def gradients(mesh, engine: Engine) -> dict[str, torch.Tensor]:
    """By name; of an embedding on two ranks the sum over both, and over tp where each rank has a part of the sum."""
    decoders = [chunk.decoder for chunk in engine.chunks]
    found = {name: p.grad.clone() for decoder in decoders for name, p in decoder.named_parameters()}
    for name in sorted(found):
        if has_partial_gradient(name, decoders[0].tp):
            mesh.tp.Allreduce(MPI.IN_PLACE, found[name].numpy())
    placement = engine.link.placement
    on_two_ranks = placement.home(placement.stages - 1)[0] != 0
    if decoders[0].model.tied and on_two_ranks and mesh.ends.size > 1:
        mesh.ends.Allreduce(MPI.IN_PLACE, found["embedding.weight"].numpy())
    return found


def check_against_one_process(mesh, engine: Engine, loss: float, name: str, microbatches: int) -> None:
    want_loss, want = in_one_process(name, microbatches)
    assert mesh.world.allreduce(loss) == pytest.approx(want_loss, rel=1e-5)
    # a key's bias has no effect on softmax: its gradient is rounding alone, so the whole norm bounds it
    noise = 1e-6 * torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
    for key, gradient in gradients(mesh, engine).items():
        start, shape = shard_of(key, tuple(want[key].shape), mesh.tp.rank, mesh.tp.size)
        part = want[key][tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        error = torch.linalg.vector_norm(gradient - part)
        assert error <= max(1e-5 * torch.linalg.vector_norm(want[key]), noise), key


def is_idle(engine: Engine) -> bool:
    """Whether nothing of a finished run is kept."""
    kept = [engine._here, engine._taken, engine._outgoing, engine.link.coming, engine.link.leaving]
    return not any(kept) and not any(chunk.live for chunk in engine.chunks)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_are_those_of_one_process_in_the_memory_promised(comm, name, kind):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        for microbatches in microbatches_of(comm.size):
            schedule = schedule_of(kind, comm.size, microbatches)
            engine = engine_of(mesh, MODELS[name], schedule.placement)
            loss = engine.run(schedule, *samples(microbatches), SCALE)
            check_against_one_process(mesh, engine, loss, name, microbatches)
            assert engine.peak_live == simulate(schedule).peak_live[mesh.pp.rank]
            assert is_idle(engine)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [("1f1b", None), ("interleaved", 2), ("zb-v", None), ("mixed", None)], ids=str)
def test_gradients_of_split_layers_recomputed_and_scored_in_pieces_are_those_of_one_process(comm, name, kind):
    with open_mesh(comm, MeshConfig(pp=comm.size // 2, tp=2)) as mesh:
        schedule = schedule_of(kind, mesh.pp.size, 3)
        for sequence, words, loss_tokens in [
            (False, ("none",), 0),
            (True, ("selective", "full"), 3),
            (True, ("none", "selective"), 0),
            (False, ("full", "selective", "none"), 6),
        ]:
            tp = tensor_parallel(group_of(mesh.tp), sequence)
            engine = engine_of(mesh, MODELS[name], schedule.placement, tp)
            for chunk, word in zip(engine.chunks, itertools.cycle(words)):
                chunk.decoder.recompute, chunk.decoder.loss_tokens = word, loss_tokens
            loss = engine.run(schedule, *samples(3), SCALE)
            check_against_one_process(mesh, engine, loss, name, 3)
            assert loss == 0 or mesh.tp.rank == 0
            assert is_idle(engine)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stages_in_16_bits_have_the_bits_of_one_process_in_16_bits(comm, dtype):
    """Messages lose nothing: with one microbatch no sum has another order."""
    model = MODELS["untied"]
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        schedule = schedule_of(("1f1b", None), comm.size, 1)
        engine = engine_of(mesh, model, schedule.placement, dtype=dtype)
        engine.link.codecs = {(way, peer): "exp" for way in (FORWARD, BACKWARD) for peer in range(comm.size)}
        loss = engine.run(schedule, *samples(1), SCALE)
        whole = build(model, split_layers(model, 1)[0], seed=5, dtype=dtype)
        inputs, targets = samples(1)
        want = cross_entropy_sum(whole(inputs[0]), targets[0])
        (SCALE * want).backward()
        assert mesh.pp.allreduce(loss) == want.item()
        for key, gradient in gradients(mesh, engine).items():
            assert gradient.dtype == dtype
            assert torch.equal(gradient, whole.get_parameter(key).grad), key


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("kind", [("1f1b", None), ("interleaved", 2), ("zb-v", None)], ids=str)
def test_gradients_add_up_over_runs_and_the_loss_does_not(comm, kind):
    schedule = schedule_of(kind, comm.size, 3)
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = engine_of(mesh, MODELS["untied"], schedule.placement)
        first = engine.run(schedule, *samples(3), SCALE)
        once = gradients(mesh, engine)
        assert engine.run(schedule, *samples(3), SCALE) == first
        for key, gradient in gradients(mesh, engine).items():
            torch.testing.assert_close(gradient, 2 * once[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("placement", [(1, "loop"), (2, "loop"), (3, "loop"), (2, "v"), (3, "v")], ids=str)
def test_a_pass_without_gradients_scores_the_same_and_keeps_nothing(comm, placement):
    chunks, kind = placement
    schedule = forward_only(Placement(comm.size, chunks, kind), 4)
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = engine_of(mesh, MODELS["tied"], schedule.placement)
        with torch.no_grad():
            loss = engine.run(schedule, *samples(4), SCALE)
        assert mesh.pp.allreduce(loss) == pytest.approx(in_one_process("tied", 4)[0], rel=1e-5)
        assert all(p.grad is None for chunk in engine.chunks for p in chunk.decoder.parameters())
        assert engine.peak_live == 0
        assert is_idle(engine)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_receive_buffers_are_used_again(comm, kind):
    """However many steps there are and, but for gpipe and the late halves of `mixed`, however many microbatches."""
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = engine_of(mesh, MODELS["untied"], schedule_of(kind, comm.size, 1).placement)
        handed_out = []
        for microbatches in (4 * comm.size, 4 * comm.size, 6 * comm.size, 6 * comm.size):  # enough to fill any pipe
            engine.run(schedule_of(kind, comm.size, microbatches), *samples(microbatches), SCALE)
            handed_out.append(len(engine.link.seen))
        assert handed_out[1] == handed_out[0]
        assert handed_out[3] == handed_out[2]
        assert kind[0] in ("gpipe", "mixed") or handed_out[2] <= handed_out[0] + 1


@pytest.mark.parallel([2, 3, 4])
def test_validation_needs_few_receive_buffers_for_any_number_of_microbatches(comm):
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = engine_of(mesh, MODELS["untied"], Placement(comm.size))
        with torch.no_grad():
            engine.run(forward_only(engine.link.placement, 12), *samples(12), SCALE)
        assert len(engine.link.seen) <= (3 if mesh.pp.rank > 0 else 0)  # in use, on its way, and posted ahead of it


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", [("1f1b", None), ("zb-v", None), ("interleaved", 3)], ids=str)
def test_a_record_holds_each_action_once_in_order_and_what_was_waited_for(comm, kind):
    schedule, notes = schedule_of(kind, comm.size, 5), []
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        engine = engine_of(mesh, MODELS["tied"], schedule.placement)
        engine.record = lambda *note: notes.append(note)
        engine.run(schedule, *samples(5), SCALE)
    actions = schedule.actions[comm.rank]
    assert [text for what, text, *_ in notes if what == "compute"] == [str(a) for a in actions if a.op in COMPUTE]
    receives = [str(a) for a in actions if a.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD)]
    assert sorted(text for what, text, *_ in notes if what == "wait") == sorted([*receives, "sends"])
    times = [time for *_, start, end in notes for time in (start, end)]
    assert times == sorted(times)  # spans follow one another: a wait is no part of what waits for it


@pytest.mark.parallel(2)
def test_a_neighbour_that_does_not_come_is_named_and_may_come_late(comm):
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        link = Link(mesh, Placement(2, 2), (1, 2, 3), Waits(limit_s=0.2))
        # stage 1 on rank 1 sends to stage 2, chunk 1 of rank 0; stage 1 gets that stage's gradient
        here, there, cargo, stage = [
            (Action(Op.RECV_FORWARD, 7, 1), Action(Op.SEND_BACKWARD, 7, 1), "activation", 1),
            (Action(Op.RECV_BACKWARD, 7, 0), Action(Op.SEND_FORWARD, 7, 0), "gradient", 2),
        ][mesh.pp.rank]
        peer = 1 - mesh.pp.rank
        link.receive(here)
        with pytest.raises(StallError, match=rf"the {cargo} of microbatch 7 from stage {stage} \(rank {peer}\)"):
            link.take(here)
        assert [(message.action, message.peer) for message in link.coming.values()] == [(here, peer)]
        comm.Barrier()
        link.send(there, torch.full((1, 2, 3), float(mesh.pp.rank)))
        assert [(message.action, message.peer) for message in link.leaving] == [(there, peer)]
        link.waits.limit_s = 60.0
        assert torch.all(link.take(here) == peer)
        link.finish()
        assert not link.coming
        assert not link.leaving


@pytest.mark.parallel([2, 3])
def test_messages_arrive_where_they_belong_in_whatever_order_receives_are_posted(comm):
    placement = Placement(comm.size, 3)
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        link = Link(mesh, placement, (1, 2, 3), Waits(limit_s=60.0))
        sends = [
            (placement.home(stage)[0], Action(op, m, placement.home(stage)[1]))
            for stage in range(1, placement.stages - 1)
            for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)
            for m in (0, 1)
        ]
        awaited = {}
        for value, (rank, send) in enumerate(sends):
            peer, receive = other_end(placement, rank, send)
            if peer == comm.rank:
                awaited[receive] = value
            if rank == comm.rank:
                link.send(send, torch.full((1, 2, 3), float(value)))
        for receive in reversed(awaited):
            link.receive(receive)
        for receive, value in awaited.items():
            assert torch.all(link.take(receive) == value), receive
        link.finish()


@pytest.mark.parametrize("split", [False, True])
def test_an_output_takes_no_memory_once_it_was_sent_and_an_input_none_after_its_gradient(split):
    model = MODELS["untied"]
    chunk = Chunk(build(model, split_layers(model, 3)[1], seed=5))
    x = torch.randn(SIZE, LENGTH, model.hidden)
    output = chunk.forward(0, x, torch.empty(0), 1.0, split)
    gradient = torch.ones_like(output)
    memory = StorageWeakRef(output.untyped_storage())
    assert not memory.expired()
    del output
    assert memory.expired()
    assert chunk.live == 1
    memory = StorageWeakRef(x.untyped_storage())
    chunk.backward(0, gradient)
    del x
    assert memory.expired()
    assert chunk.live == int(split)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_an_embedding_at_both_ends_of_one_rank_is_one_parameter_if_it_is_tied(name, chunks):
    model = dataclasses.replace(MODELS[name], layers=3)
    decoders = build_chunks(model, split_layers(model, chunks))
    first, last = decoders[0], decoders[-1]
    embedding, head = first.embedding.weight, last.embedding.weight if model.tied else last.head.weight
    assert (embedding is head) == model.tied
