"""Error feedback: nothing is lost for good, whatever the codec, the ranks and the nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import strips
from hpcllm.collectives.feedback import ErrorFeedback
from hpcllm.collectives.group import make_group
from hpcllm.collectives.operations import allreduce
from hpcllm.mpi.partition import chunk_range

CODECS = ["int4:32", "int8:256:sr", "bf16", "zfp:8"]
LENGTHS = [0, 1, 100, 3000]
SHORT, LONG = 5, 40  # steps


def gradient(n: int, step: int, rank: int) -> torch.Tensor:
    """Mostly the same at every step, as gradients are: what rounding nearest is worst at."""
    steady = np.random.default_rng([rank, n]).standard_normal(n)
    return torch.from_numpy((steady + 0.1 * np.random.default_rng([rank, n, step]).standard_normal(n)).astype("f4"))


def groups(comm):
    """All ranks on one node; each on its own; nodes of two."""
    yield make_group(comm)
    yield make_group(comm, MPI.Intracomm(comm.Split(comm.rank)))
    if comm.size > 2:
        yield make_group(comm, MPI.Intracomm(comm.Split(comm.rank // 2, comm.rank)))


@pytest.mark.parallel([1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("through_grid", [False, True])
def test_what_was_delivered_and_not_asked_for_is_known(comm, monkeypatch, name, through_grid):
    monkeypatch.setattr(strips, "GRID_RANKS", 2 if through_grid else 100)
    monkeypatch.setattr(strips, "LEAST_VALUES", 300)
    for group in groups(comm):
        for n in LENGTHS:
            feedback = ErrorFeedback(n, group, find_codec(name))
            asked, delivered, residual = np.zeros(n), np.zeros(n), np.zeros(n)
            for step in range(4):
                x = gradient(n, step, comm.rank)
                asked += comm.allreduce(x.double().numpy())
                feedback.allreduce(x)
                delivered += x.numpy()
                assert len(set(comm.allgather(x.numpy().tobytes()))) == 1
            residual[feedback.lane] = feedback.residual
            roundings = 2.0**-24 * 100 * (comm.size + 1)
            assert np.all(np.abs(delivered - asked - comm.allreduce(residual)) <= roundings)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_a_chunk_that_was_delivered_and_not_asked_for_is_owed_by_the_others(comm, name):
    for group in groups(comm):
        for n in LENGTHS:
            feedback = ErrorFeedback(n, group, find_codec(name), "reduce_scatter")
            own = slice(*chunk_range(n, comm.size, comm.rank))
            asked, delivered = np.zeros(n), np.zeros(own.stop - own.start)
            for step in range(4):
                x, chunk = gradient(n, step, comm.rank), torch.empty(own.stop - own.start)
                asked += comm.allreduce(x.double().numpy())
                feedback.reduce_scatter(x, chunk)
                delivered += chunk.numpy()
                assert not feedback.residual[own].any()
            owed = comm.allreduce(feedback.residual.double().numpy())[own]
            assert np.all(np.abs(delivered - asked[own] - owed) <= 2.0**-24 * 100 * (comm.size + 1))


def drift(comm, name: str, feedback: bool) -> tuple[float, float]:
    """How far what was added up is from what should have been, RMS, after SHORT and after LONG steps."""
    n, group, away, after = 2000, make_group(comm), np.zeros(2000), {}
    codec = find_codec(name)
    remembering = ErrorFeedback(n, group, codec)
    for step in range(LONG):
        x = gradient(n, step, comm.rank)
        away -= comm.allreduce(x.double().numpy())
        if feedback:
            remembering.allreduce(x)
        else:
            allreduce(x, group, codec, "two_step")
        away += x.double().numpy()
        after[step + 1] = float(np.sqrt(np.mean(away**2)))
    return after[SHORT], after[LONG]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", ["int4:128", "int4:32"])
def test_with_feedback_the_error_does_not_grow_with_the_steps(comm, name):
    short, long = drift(comm, name, feedback=True)
    plain_short, plain_long = drift(comm, name, feedback=False)
    assert long < 1.5 * short
    assert plain_long > 2 * plain_short
    assert plain_long > 5 * long


@pytest.mark.parallel([2, 3])
def test_the_same_sums_again_have_the_same_bits(comm):
    def run() -> bytes:
        feedback = ErrorFeedback(999, make_group(comm), find_codec("int4:64:sr"))
        x = torch.zeros(999)
        for step in range(4):
            x = gradient(999, step, comm.rank)
            feedback.allreduce(x)
        return x.numpy().tobytes()

    assert run() == run()


@pytest.mark.parallel([2, 3])
def test_a_value_that_is_no_number_is_passed_on_and_then_forgotten(comm):
    feedback = ErrorFeedback(1000, make_group(comm), find_codec("int8:32"))
    for bad in (float("nan"), float("inf")):
        x = gradient(1000, 0, comm.rank)
        if comm.rank == comm.size - 1:
            x[[0, 999]] = bad
        feedback.allreduce(x)
        assert not torch.isfinite(x[[0, 999]]).any()
        assert comm.allreduce(int(torch.isfinite(feedback.residual).all())) == comm.size
        x = gradient(1000, 1, comm.rank)
        feedback.allreduce(x)
        assert torch.all(torch.isfinite(x))


@pytest.mark.parallel([2])
def test_where_there_is_nothing_to_feed_back_is_refused(comm):
    group = make_group(comm)
    with pytest.raises(ValueError, match="not for raw"):
        ErrorFeedback(10, group, find_codec("raw"))
    with pytest.raises(ValueError, match="bfloat16"):
        ErrorFeedback(10, group, find_codec("int8", torch.bfloat16))
    with pytest.raises(ValueError, match="of 10 values, but the array has 11"):
        ErrorFeedback(10, group, find_codec("int8")).allreduce(torch.zeros(11))
