"""Sums in two halves, as between nodes: the run is that of one process, and nobody sees that an update waits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import losses, run_steps, tiny

from hpcllm.collectives import group
from hpcllm.optim.weights import LateWeights
from hpcllm.training.step import forward_backward

LAYOUTS = {2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, 2)]}
CODECS = ["raw", "int8:256", "int8:256:sr"]


@pytest.fixture
def each_rank_a_node(monkeypatch):
    """Each rank counts as a node of its own: one machine has no more."""
    make_group = group.make_group
    monkeypatch.setattr(group, "make_group", lambda comm, _=None: make_group(comm, MPI.COMM_SELF))


def state(run) -> bytes:
    """All that this rank updates, weights and moments, to the bit."""
    pieces = run.optimizer.pieces_to_read()
    return b"".join(piece.values.detach().contiguous().view(torch.uint8).numpy().tobytes() for piece in pieces)


@pytest.mark.usefixtures("each_rank_a_node")
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_steps_are_those_of_one_process(comm, compute):
    precision = {"compute": compute}
    want = losses(tiny(precision=precision), MPI.COMM_SELF, 12)

    def steps_of(run) -> np.ndarray:
        assert isinstance(run.optimizer.weights, LateWeights)
        return run_steps(run, 12)

    for dp, pp, tp in LAYOUTS[comm.size]:
        for schedule, microbatches in [("1f1b", 1), ("zb-h1", 3)] if dp < 3 else [("gpipe", 3 - dp % 2)]:
            mesh = {"dp": dp, "pp": pp, "tp": tp, "sequence_parallel": tp > 1}
            config = tiny(mesh=mesh, precision=precision, pipeline={"schedule": schedule, "microbatches": microbatches})
            got = losses(config, comm, 0, steps_of)
            np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-5 if compute == "fp32" else 2e-2)
            np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=1e-4 if compute == "fp32" else 2e-1)


@pytest.mark.usefixtures("each_rank_a_node")
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_an_update_may_be_made_at_once_or_when_its_weights_are_used(comm, codec):
    """The law that saving, validation and the hash lean on: to settle between two steps changes no bit."""
    config = tiny(communication={"gradients": codec, "exact_steps": 2, "bucket_mib": 0.02})

    def settled(run) -> tuple[bytes, list[np.ndarray]]:
        seen = []
        for step in range(6):
            seen.append(run_steps(run, 1, first=step))
            run.optimizer.settle()
        return state(run), seen

    def late(run) -> tuple[bytes, list[np.ndarray]]:
        seen = [run_steps(run, 1, first=step) for step in range(6)]
        assert run.optimizer.weights._late  # there is something to settle
        return state(run), seen

    (want, at_once), (got, waited) = losses(config, comm, 0, settled), losses(config, comm, 0, late)
    assert got == want
    assert np.array_equal(at_once, waited)
    assert comm.allgather(got).count(got) == comm.size  # and replicas are equal


@pytest.mark.usefixtures("each_rank_a_node")
@pytest.mark.parallel([2, 3])
def test_each_half_sends_as_much_and_the_second_leaves_after_the_norm_is_known(comm):
    config = tiny(communication={"bucket_mib": 16, "exact": ""})

    def sent(run) -> list[int]:
        wire, seen = run.optimization.wires["gradients"], [0]
        for step in range(2):
            forward_backward(run, step, 0)
            seen.append(wire.sent_bytes)
            run.optimizer.update(1e-3, 1.0)
            run.optimizer.settle()
            seen.append(wire.sent_bytes)
        return [*np.diff(seen).tolist(), sum(p.numel() for p in run.parameters.values())]

    *halves, values = np.sum(comm.allgather(losses(config, comm, 0, sent)), axis=0)
    assert halves == [4 * (comm.size - 1) * values / comm.size] * 4


@pytest.mark.usefixtures("each_rank_a_node")
@pytest.mark.parallel([2, 3])
def test_what_waits_is_used_up_by_the_first_forward_pass(comm):
    """Before a backward pass writes gradients anew: validation, too, sees updated weights."""

    def check(run) -> None:
        run_steps(run, 2)
        weights = run.optimizer.weights
        left = [len(weights._late)]
        decoder = run.engine.chunks[0].decoder
        with torch.inference_mode():
            x = decoder._embed(torch.zeros(1, 4, dtype=torch.int64), None)
            left.append(len(weights._late))
            for number in decoder.blocks:
                weights.before_unit(f"blocks.{number}", x)
                left.append(len(weights._late))
        assert all(after <= before for before, after in pairwise(left))
        assert left[0] > left[1] > left[-1] == 0
        before = state(run)
        run.optimizer.settle()
        assert state(run) == before

    losses(tiny(), comm, 0, check)


@pytest.mark.usefixtures("each_rank_a_node")
@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("tables", "late"),
    [
        ({}, True),
        ({"communication": {"gradients": "int8:256+ef"}}, False),  # feedback knows the whole sum
        ({"communication": {"algorithm": "two_step"}}, False),  # as the user says
        ({"optimizer": {"shard": "states"}}, False),  # its weights are gathered late
        ({"mesh": {"dp": 1, "pp": 2}}, False),  # nobody to sum with
    ],
)
def test_sums_are_late_only_where_replicas_are_alone_on_their_nodes(comm, tables, late):
    assert losses(tiny(**tables), comm, 0, lambda run: isinstance(run.optimizer.weights, LateWeights)) == late


@pytest.mark.parallel([2, 3])
def test_sums_on_one_node_are_at_once(comm):
    assert not losses(tiny(), comm, 0, lambda run: isinstance(run.optimizer.weights, LateWeights))
