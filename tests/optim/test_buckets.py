"""Gradient buckets: whatever their size, the sum of the replicas' gradients, the same bits on all, in one order."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import group_of, shared_zeros
from hpcllm.collectives.worker import Worker
from hpcllm.config.policies import is_exact
from hpcllm.config.schema import CommunicationConfig, Config, MeshConfig, ModelConfig, RunConfig
from hpcllm.model.initialisation import build
from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.shapes import split_layers
from hpcllm.mpi.mesh import open_mesh
from hpcllm.optim.buckets import GradientBuckets
from hpcllm.optim.flat_buffers import Traits, lay_out
from hpcllm.optim.gradient_reduce import GradientReduce
from hpcllm.optim.shard_spec import Groups, make_shard_specs

MODEL = ModelConfig(layers=4, hidden=24, heads=3, ffn=40, vocabulary=61, max_sequence=12, tied=True)
SIZES_BYTES = [1, 4096, 20_000, 1e9]  # a bucket a parameter, some parameters each, one bucket
EXACT = ["", "norm,bias,embedding", "weight"]  # no parameter, some, all


class Listed(Worker):
    """A worker that only notes what it should do."""

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.jobs: list[partial] = []

    def submit(self, job) -> None:
        self.jobs.append(job)


def names_of(bucket) -> list[str]:
    return list(bucket.spec.buffer.names)


@pytest.fixture
def alone():
    """The mesh of one rank. The gradients lie in its shared memory: nobody may touch them once it is closed."""
    with open_mesh(MPI.COMM_SELF, MeshConfig()) as mesh:
        yield mesh


def decoder():
    return build(MODEL, split_layers(MODEL, 1)[0], seed=3)


def buckets_of(
    model,
    mesh,
    bucket_bytes: float,
    algorithm: str = "ring",
    codec: str = "raw",
    exact: str = "",
    additions: int = 2,
    memory=None,
) -> GradientBuckets:
    """additions: backward passes a step; memory: by default what the node shares."""
    shared = "embedding.weight" if mesh.ends.size > 1 else None
    communication = CommunicationConfig(
        gradients=codec, exact=exact, algorithm=algorithm, bucket_mib=bucket_bytes / 2**20
    )
    config = Config(run=RunConfig(seed=5), communication=communication)
    groups, parameters = Groups(group_of(mesh.dp), group_of(mesh.ends)), dict(model.named_parameters())
    counts = dict.fromkeys(parameters, additions)
    memory = memory or (lambda n: shared_zeros(n, groups.replicas))
    return GradientBuckets(make_shard_specs(parameters, counts, shared, config, groups), parameters, Worker(), memory)


def loss_of(model, replica: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * replica + microbatch)
    tokens = torch.randint(MODEL.vocabulary, (2, 10), generator=generator)
    return cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:].contiguous()) / 18


def one_step(
    model, buckets: GradientBuckets, replica: int, microbatches: int = 2, step: int = 0, exact: bool = False
) -> None:
    buckets.begin(step, exact)
    for m in range(microbatches):
        loss_of(model, replica, m).backward()
    buckets.finish()


def in_one_process(replicas: int, microbatches: int = 2) -> dict[str, torch.Tensor]:
    model = decoder()
    for replica in range(replicas):
        for m in range(microbatches):
            loss_of(model, replica, m).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", SIZES_BYTES)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_sums_are_those_of_one_process_and_the_same_bits_on_every_replica(comm, bucket_bytes, algorithm):
    want = in_one_process(comm.size)
    with open_mesh(comm, MeshConfig()) as mesh:
        model = decoder()
        buckets = buckets_of(model, mesh, bucket_bytes, algorithm)
        for _ in range(2):  # a second step sums its own gradients only
            one_step(model, buckets, comm.rank)
            whole = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
            for name, p in model.named_parameters():
                error = torch.linalg.vector_norm(p.grad - want[name])
                assert error <= 1e-6 * max(torch.linalg.vector_norm(want[name]), 0.1 * whole), name
            copies = comm.allgather(b"".join(bucket.gradients.numpy().tobytes() for bucket in buckets.buckets))
            assert all(copy == copies[0] for copy in copies)
        if algorithm == "ring":  # each value crosses every link but one, in each half, in both steps
            values = sum(p.numel() for p in model.parameters())
            assert comm.allreduce(group_of(mesh.dp).wire.sent_bytes) == 2 * 2 * (comm.size - 1) * 4 * values
        buckets.worker.close()


@pytest.mark.parallel([2, 3])
def test_sums_that_ended_before_the_passes_did_count_as_hidden(comm):
    with open_mesh(comm, MeshConfig()) as mesh:
        model = decoder()
        buckets = buckets_of(model, mesh, 20_000)
        worker, hidden_s = buckets.worker, 0.0
        for step in range(2):
            buckets.begin(step, exact=False)
            for m in range(2):
                loss_of(model, comm.rank, m).backward()
            for bucket in buckets.buckets:
                bucket.job.result()
            buckets.finish()
            assert worker.hidden_s == pytest.approx(worker.busy_s - worker.exposed_s)
            assert worker.hidden_s > hidden_s or not worker.threaded
            hidden_s = worker.hidden_s
        worker.close()


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_shared_embedding_gets_the_sum_of_both_ends(comm):
    """Stage s brings the constant 10^s on every parameter; only the shared embedding crosses stages."""
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        stage = build(MODEL, split_layers(MODEL, mesh.pp.size)[mesh.pp.rank], seed=3)
        buckets = buckets_of(stage, mesh, 4096, additions=1)
        buckets.begin(0, exact=False)
        sum(p.sum() for p in stage.parameters()).mul(10.0**mesh.pp.rank).backward()
        buckets.finish()
        last = mesh.pp.size - 1
        for name, p in stage.named_parameters():
            shared = name == "embedding.weight" and last > 0
            assert torch.all(p.grad == (1 + 10.0**last if shared else 10.0**mesh.pp.rank)), name
        everything = sum(p.grad.double().square().sum().item() for p in stage.parameters())
        embedding = (1 + 10.0**last) ** 2 * MODEL.vocabulary * MODEL.hidden
        not_owned = embedding if last and mesh.pp.rank == last else 0
        assert buckets.squared_norm().item() == pytest.approx(everything - not_owned, rel=1e-4)
        buckets.worker.close()


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("codec", ["int8:128", "int8:128:sr", "int4:32+ef", "exp", "bf16"])
def test_coded_sums_are_near_equal_on_every_replica_and_exact_where_told(comm, codec):
    want = in_one_process(comm.size)
    whole = torch.linalg.vector_norm(torch.cat([g.flatten() for g in want.values()]))
    exact_names, runs = "norm,bias,embedding", []
    lossless = not codec.endswith("+ef") and find_codec(codec).lossless
    with open_mesh(comm, MeshConfig()) as mesh:
        for _ in range(2):
            model = decoder()
            buckets = buckets_of(model, mesh, 4096, "auto", codec, exact_names)
            for step, exact in [(0, True), (1, False)]:
                one_step(model, buckets, comm.rank, step=step, exact=exact)
                for name, p in model.named_parameters():
                    # neighbours in a bucket share blocks, and so the scale of the larger one
                    size = max(torch.linalg.vector_norm(want[name]), 0.3 * whole)
                    error = torch.linalg.vector_norm(p.grad - want[name]) / size
                    assert error <= (1e-5 if exact or lossless or is_exact(name, exact_names) else 0.2), (name, error)
                mine = b"".join(bucket.gradients.numpy().tobytes() for bucket in buckets.buckets)
                assert comm.allgather(mine).count(mine) == comm.size
                runs.append((step, mine))
            buckets.worker.close()
    assert runs[:2] == runs[2:]  # the same bits again
    if not lossless:  # a lossless sum may be made in another order than the exact one
        assert (runs[0][1] != runs[1][1]) == (comm.size > 1)  # the codec had a say after the exact step


@pytest.mark.parametrize("bucket_bytes", SIZES_BYTES)
@pytest.mark.parametrize("exact", EXACT)
def test_every_parameter_is_in_one_bucket_of_its_kind_and_its_gradient_is_a_view(alone, bucket_bytes, exact):
    model = decoder()
    buckets = buckets_of(model, alone, bucket_bytes, codec="int8:256", exact=exact).buckets
    parameters = dict(model.named_parameters())
    backward = list(reversed(parameters))
    assert sorted(name for bucket in buckets for name in names_of(bucket)) == sorted(parameters)
    completed = [backward.index(names_of(bucket)[-1]) for bucket in buckets]
    assert completed == sorted(completed)  # in the order in which the backward pass completes them
    for bucket in buckets:
        names = names_of(bucket)
        assert len({is_exact(name, exact) for name in names}) == 1
        assert bucket.spec.reduce.codec_name == ("raw" if is_exact(names[0], exact) else "int8:256")
        assert names == sorted(names, key=backward.index)
        bucket.gradients.copy_(torch.arange(bucket.gradients.numel()))
        assert torch.equal(torch.cat([parameters[name].grad.flatten() for name in names]), bucket.gradients)
        full_without_the_last = 4 * sum(parameters[name].numel() for name in names[:-1])
        assert full_without_the_last < bucket_bytes


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 1000),
    st.sampled_from(["", "blocks.3"]),
)
def test_sums_begin_early_and_the_last_one_is_short(sizes, buffer_values, unit):
    """But for what a single parameter makes longer; whole parameters, in backward order."""
    names = {str(number): size for number, size in enumerate(sizes)}
    buffers = lay_out(names, lambda _: Traits(exact=False, unit=unit), buffer_values)
    assert [name for buffer in buffers for name in buffer.names] == list(reversed(names))
    assert all(sum(buffer.sizes[:-1]) < buffer_values for buffer in buffers)
    short = buffer_values if unit else buffer_values / 4
    assert all(buffer.size >= short for buffer in buffers[:-1])
    assert sum(buffer.size < buffer_values for buffer in buffers[:-1]) <= (0 if unit else 2)  # the ends
    if not unit:
        first, last = buffers[0].sizes, buffers[-1].sizes
        assert sum(first[:-1]) < short
        assert not any(sum(last[:cut]) >= short >= sum(last[cut:]) for cut in range(1, len(last)))


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False), st.sampled_from(SIZES_BYTES), st.integers(1, 3))
def test_buckets_are_submitted_in_one_order_and_not_too_early_in_whatever_order_gradients_come(
    chance: random.Random, bucket_bytes, additions
):
    model = decoder()
    parameters, left = dict(model.named_parameters()), Counter()
    coming = [name for name in parameters for _ in range(additions)]
    with open_mesh(MPI.COMM_SELF, MeshConfig()) as mesh:
        buckets = buckets_of(model, mesh, bucket_bytes, additions=additions, memory=torch.zeros)
    for step, alone in enumerate((False, False, True)):
        buckets.worker = Listed()
        buckets.begin(step, exact=False)
        left.update(coming)
        chance.shuffle(coming)
        with mock.patch.object(GradientReduce, "is_alone", alone):
            for name in coming:
                left[name] -= 1
                if parameters[name].grad is None:  # as autograd leaves the first one of a step
                    parameters[name].grad = torch.zeros_like(parameters[name])
                buckets.added(parameters[name])
                submitted = [job.args[0] for job in buckets.worker.jobs]
                assert not any(left[done] for bucket in submitted for done in names_of(bucket))
        assert submitted == ([] if alone else buckets.buckets)  # nobody to sum with: nothing to do


def test_a_parameter_without_gradient_is_our_own_mistake(alone):
    model = decoder()
    buckets = buckets_of(model, alone, 4096, additions=1)
    buckets.worker = Listed()
    buckets.begin(0, exact=False)
    model.hidden_states(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()  # the final norm is not used
    with pytest.raises(AssertionError, match="fewer gradients than said"):
        buckets.finish()


@pytest.mark.parametrize("bucket_bytes", SIZES_BYTES)
def test_the_norm_is_that_of_all_gradients(alone, bucket_bytes):
    model = decoder()
    buckets = buckets_of(model, alone, bucket_bytes)
    one_step(model, buckets, 0)
    want = sum(p.grad.double().square().sum().item() for p in model.parameters())
    assert buckets.squared_norm().item() == pytest.approx(want, rel=1e-5)
    assert buckets.is_finite()
    next(model.parameters()).grad.view(-1)[-1] = float("inf")
    assert not buckets.is_finite()
