"""Runs whose updates our kernel makes are those that PyTorch's makes: on replicas, with shares, from host memory."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from emulated import EMULATOR, why_not
from pytest_mpi import parallel_assert
from small_runs import losses, run_steps, tiny

from hpcllm.optim import adamw
from hpcllm.optim.flat_buffers import MASTER, MODEL
from hpcllm.optim.weights import GatheredWeights, Weights, Zero3Weights

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
LEVELS = ["none", "states", "states+gradients", "all"]
STEPS = 3


def config(shard, compute="bf16", parameters="raw", offload=False, device="cpu"):
    """Gradients are clipped in each step; a bucket has matrices and vectors, and shares begin at odd places."""
    return tiny(
        run={"device": device},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 2, "shard": shard, "clip_norm": 0.5, "offload": offload},
        precision={"compute": compute},
        communication={"bucket_mib": 0.02, "parameters": parameters, "exact_steps": 1, "exact": ""},
    )


def state(run):
    """Weights and states of this rank, by kind and place: copies."""
    run.optimizer.settle()
    pieces = run.optimizer.pieces_to_read()
    return {(p.kind, p.name, p.start): p.values.detach().cpu().clone() for p in pieces}


def trained(run):
    seen = run_steps(run, STEPS)
    return seen, state(run)


def copied(monkeypatch):
    """Kinds of the weights that will still have to be made of the masters by a pass of their own."""
    kinds = set()

    def noting(refresh):
        def noted(weights, number, master):
            kinds.update({type(weights).__name__} if master is not None else ())
            refresh(weights, number, master)

        return noted

    for kind in (Weights, GatheredWeights, Zero3Weights):
        monkeypatch.setattr(kind, "refresh", noting(kind.refresh))
    return kinds


def by_kernel(monkeypatch):
    """From now on; returns what it will have launched."""
    launched = []

    class Noting:
        def launch(self, program, kernel, groups, arguments):
            launched.append(kernel)
            EMULATOR.launch(program, kernel, groups, arguments)

    monkeypatch.setattr(adamw, "launcher_of", lambda _: (Noting(), ""))
    return launched


KINDS = [("bf16", "raw"), ("bf16", "int8:256"), ("fp32", "raw")]


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize(("compute", "parameters"), KINDS)
def test_a_run_is_that_of_pytorchs_updates(comm, monkeypatch, shard, compute, parameters):
    """Replicas stay equal to the bit, and weights that no lossy codec sends are the masters, rounded."""
    wanted = config(shard, compute, parameters)
    plain, _ = losses(wanted, comm, 0, trained)
    launched, kinds = by_kernel(monkeypatch), copied(monkeypatch)
    found, states = losses(wanted, comm, 0, trained)
    parallel_assert(len(launched) % STEPS == 0 and len(launched) > 0)
    sends_differences = parameters != "raw" and shard in ("states", "states+gradients")
    parallel_assert(kinds == ({"GatheredWeights"} if sends_differences else set()))
    np.testing.assert_allclose(found, plain, rtol=2e-3 if compute == "bf16" else 1e-5)
    masters = {key[1:]: values for key, values in states.items() if key[0] == MASTER}
    parallel_assert(bool(masters) == (compute == "bf16"))
    if parameters == "raw" or shard in ("none", "all"):
        parallel_assert(
            all((states[MODEL, *key] == m.to(states[MODEL, *key].dtype)).all() for key, m in masters.items())
        )
    if shard == "none":
        digest = hashlib.sha256(b"".join(values.view(-1).numpy(force=True).tobytes() for values in masters.values()))
        parallel_assert(len(set(comm.allgather(digest.hexdigest()))) == 1)


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("shard", LEVELS)
def test_a_state_read_back_goes_on_to_the_bit(comm, monkeypatch, shard):
    by_kernel(monkeypatch)

    def take(run):
        run_steps(run, STEPS)
        return state(run), run_steps(run, 2, first=STEPS)

    def put(run):
        for piece in run.optimizer.pieces_to_read():
            piece.values.copy_(kept[piece.kind, piece.name, piece.start])
        run.optimizer.loaded(STEPS)
        return run_steps(run, 2, first=STEPS)

    kept, want = losses(config(shard), comm, 0, take)
    found = losses(config(shard), comm, 0, put)
    parallel_assert(np.array_equal(found, want))


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("shard", LEVELS)
def test_on_a_device_states_may_rest_in_host_memory(comm, monkeypatch, shard):
    """The same bits, and nothing that the kernel reads or writes is used without order."""
    launched = by_kernel(monkeypatch)
    (here, states), (there, rested) = (losses(config(shard, offload=rests, device="gpu"), comm, 0, trained)
                                       for rests in (False, True))  # fmt: skip
    parallel_assert(len(launched) > 0)
    parallel_assert(np.array_equal(here, there))
    parallel_assert(all((rested[key] == values).all() for key, values in states.items()))
