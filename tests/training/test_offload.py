"""States and activations that wait in host memory: the same bits, less memory on the device, on every layout."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pretend
import pytest
import small_runs
import torch
from mpi4py import MPI
from small_checkpoints import stored_tensors

from hpcllm.errors import ConfigError
from hpcllm.optim import host_states
from hpcllm.pipeline import host_activations
from hpcllm.plan.memory import predict as predict_module
from hpcllm.plan.memory.predict import predict
from hpcllm.system.job import StopSignals
from hpcllm.training import loop
from hpcllm.training.memory import STAYS, STEP, counting, measured, predicted
from hpcllm.training.setup import open_run

REACH = {"gpu_aware": "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no", "bucket_mib": 0.02}
STEPS = 3
Tables = dict[str, dict[str, Any]]

LAYOUTS: list[Tables] = [
    {},
    {"precision": {"compute": "bf16"}, "optimizer": {"shard": "states"}},
    {"precision": {"compute": "bf16"}, "optimizer": {"shard": "states+gradients"}, "pipeline": {"microbatches": 2}},
    {"precision": {"compute": "bf16"}, "optimizer": {"shard": "all"}, "pipeline": {"recompute": "full"}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3, "recompute": "selective"}, "precision": {"compute": "fp16"}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3, "schedule": "zb-h1"}},
    {"mesh": {"tp": 2, "sequence_parallel": True}, "pipeline": {"microbatches": 2, "loss_tokens": 7}},
    {
        "mesh": {"pp": 2},
        "pipeline": {"microbatches": 4, "schedule": "interleaved", "chunks": 2},
        "model": {"layers": 4},
    },
]


def wanted(tables: Tables, *offloaded: str, **more: dict[str, Any]) -> Tables:
    """The tables of a run on the device, with these of them offloaded."""
    both = {name: tables.get(name, {}) | more.get(name, {}) for name in {**tables, **more}}
    offload = {name: both.get(name, {}) | {"offload": True} for name in offloaded}
    both["data"] = {"global_batch": 24} | both.get("data", {})
    return {**both, **offload, "communication": {**REACH, **both.get("communication", {})}}


@pytest.fixture
def small(monkeypatch):
    """Small tensors leave, too, in slabs that fill up, with few of them on their way."""
    monkeypatch.setattr(host_activations, "LEAST_BYTES", 200)
    monkeypatch.setattr(host_activations, "SLAB_BYTES", 1 << 14)
    monkeypatch.setattr(host_activations, "WINDOW", 2)


@pytest.mark.pretend
@pytest.mark.usefixtures("small")
@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_bits_are_those_without(comm, tables):
    tables = small_runs.fitted(tables, comm.size)
    plain, *offloaded = (
        small_runs.losses(small_runs.tiny(**wanted(tables, *names)), comm, STEPS)
        for names in ((), ("optimizer",), ("pipeline",), ("optimizer", "pipeline"))
    )
    for found in offloaded:
        np.testing.assert_array_equal(found, plain)


@pytest.mark.pretend
@pytest.mark.usefixtures("small")
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("tables", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]], ids=str)
def test_a_run_that_goes_on_has_the_same_bits(comm, shared_path, tables):
    """Checkpoints are read where states rest; what was fetched ahead of a save, or of a start, is not used."""

    def trained(name: str, *steps: int):
        for end in steps:
            learning = {"learning_rate": 3e-3, "warmup_steps": 2, "final_fraction": 1.0}
            run = {"name": name, "folder": str(shared_path), "steps": end}
            offloaded = ("optimizer", "pipeline") if name != "plain" else ()
            more = {"run": run, "optimizer": learning, "checkpoint": {"every_steps": 2, "keep": 9}}
            with StopSignals() as signals:
                loop.train(small_runs.tiny(**wanted(tables, *offloaded, **more)), comm, signals)
            comm.Barrier()
        return stored_tensors(shared_path / name / "checkpoints" / f"step_{steps[-1]:08}.h5")

    plain = trained("plain", 5)
    assert trained("straight", 5) == plain
    assert trained("again", 2, 5) == plain


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("names", [("optimizer",), ("pipeline",), ("optimizer", "pipeline")], ids=" ".join)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_memory_is_what_was_predicted(comm, names, compute):
    """By the device's own count, and less than without."""
    tables: Tables = {
        "model": {"layers": 8, "hidden": 64, "ffn": 176},
        "data": {"sequence_length": 16, "global_batch": 384},
        "pipeline": {"microbatches": 3},
        "precision": {"compute": compute},
        "mesh": {"pp": comm.size},
    }
    steps, unseen = {}, {}
    for offloaded in ((), names):
        with open_run(small_runs.tiny(**wanted(tables, *offloaded)), comm) as run:
            with counting(run, True) as live:
                small_runs.run_steps(run, 1)
            found, told = measured(run, live.peak), predicted(run)
            host = run.engine.chunks[0].host
            told_host = predict(run.config, run.schedule, run.mesh.pp.rank).offloaded
            pinned = host.host_bytes if host else 0
            if run.optimizer.host_states:
                pinned += sum(state.nbytes for homes in run.optimizer.host_states.homes for state in homes)
        assert {kind: found[kind] for kind in STAYS} == {kind: told[kind] for kind in STAYS}
        assert told[STEP] < 1.3 * found[STEP], offloaded
        unseen[offloaded] = found[STEP] - told[STEP]  # of operations of this device, which has no fused kernels
        steps[offloaded] = found
    if "optimizer" in names:
        assert steps[names]["optimizer"] < steps[()]["optimizer"] / 2
        assert told_host == pinned
    assert unseen[names] < 1.25 * unseen[()] + 2**20
    if "pipeline" in names:
        assert steps[names][STEP] < steps[()][STEP] / 2


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
def test_states_are_at_home_when_a_run_is_closed(comm):
    """Nothing is under way any more; what is would be poison on the host."""
    with open_run(small_runs.tiny(**wanted({}, "optimizer")), comm) as run:
        small_runs.run_steps(run, 1)
        homes = run.optimizer.host_states.homes
    states = torch.cat([state for share in homes for state in share])
    assert torch.isfinite(states).all()
    assert states.any()


def test_on_the_cpu_it_is_rejected():
    for table in ("optimizer", "pipeline"):
        config = small_runs.tiny(**{table: {"offload": True}, "run": {"device": "cpu"}})
        wanted = pytest.raises(ConfigError, match=f"{table}.offload = true, but .*valid: false")
        with wanted, open_run(config, MPI.COMM_SELF):
            pass


@pytest.mark.parametrize("shard", ["states", "states+gradients"])
def test_differences_to_masters_that_are_away_are_rejected(shard):
    tables = {"optimizer": {"shard": shard, "offload": True}, "communication": {"parameters": "int8"}}
    with pytest.raises(ConfigError, match=r"optimizer\.offload = true .*'int8'.*valid: parameters = 'raw'"):
        small_runs.tiny(**tables)


def test_the_planner_knows_the_sizes():
    window = host_activations.WINDOW + host_activations.AHEAD
    known = predict_module.LANDINGS, predict_module.SLAB_BYTES, predict_module.WINDOW_TENSORS
    assert known == (host_states.LANDINGS, host_activations.SLAB_BYTES, window)


@pytest.mark.pretend
@pytest.mark.usefixtures("small", "comm")
@pytest.mark.parallel([1])
def test_a_tensor_that_two_operations_save_leaves_once():
    host = host_activations.HostActivations(torch.device("pretend", 0), [])
    x = torch.ones(100, device="pretend", requires_grad=True)
    with host.keeping(x) as saved:
        y = x * 2
        z = y * y
    assert len(saved.entries) == 1
    z.sum().backward()
    saved.done()
    assert (x.grad.cpu() == 8).all()
    assert len(host._free) == 1


@pytest.mark.pretend
@pytest.mark.usefixtures("small", "comm")
@pytest.mark.parallel([1])
def test_activations_leave_and_come_back_on_streams_of_their_own():
    """What the computation is told does not wait for either copy, and so must not read what has not been waited for."""
    host = host_activations.HostActivations(torch.device("pretend", 0), [])
    x = torch.ones(100, device="pretend", requires_grad=True)
    with host.keeping(x) as saved:
        y = x * 2
        y * y
    (entry,) = saved.entries
    torch.accelerator.current_stream(x.device).synchronize()
    assert not (entry.host == 2).any()  # poison: the computation's stream has nothing to do with it
    host.drop(entry)
    host.fetch(entry)
    entry.device.cpu()
    assert any("race" in fault for fault in pretend.native().take_faults())
    assert (host.taken(entry).cpu() == 2).all()
    saved.done()
