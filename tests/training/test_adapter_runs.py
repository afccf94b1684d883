"""Runs with low-rank adapters: the same curve on any layout, small messages and files, a base that must be there."""

from __future__ import annotations

import dataclasses
import math
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import fitted, losses, run_steps, store, tiny

from hpcllm.checkpoint.huggingface.base import fingerprint
from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.huggingface.folder import Folder
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config.schema import Config, from_tables, to_tables
from hpcllm.errors import ConfigError
from hpcllm.model.shapes import adapter_shapes, is_adapter, trained_shapes
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train
from hpcllm.training.setup import open_run

MODEL = {"layers": 4, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 48, "max_sequence": 16}
GROUPED = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 128, "max_sequence": 16}  # for tp = 2
ADAPTER = {"rank": 3, "alpha": 12.0}
LAYOUTS = [
    {"mesh": {"pp": 2}},
    {"mesh": {"tp": 2}},
    {"mesh": {"tp": 2, "sequence_parallel": True}, "optimizer": {"shard": "states+gradients"}},
    {"optimizer": {"shard": "all"}},
    {"mesh": {"tp": 2}, "optimizer": {"shard": "all"}, "pipeline": {"recompute": "full"}},
    {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"recompute": "selective"}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}},
    {"mesh": {"pp": 2, "tp": 2, "sequence_parallel": True}, "pipeline": {"schedule": "zb-v"}},
]


@cache
def base(hidden: int = 24) -> Path:
    """A checkpoint of a few steps, made by rank 0. Collective over all ranks the first time."""
    comm, folder = MPI.COMM_WORLD, store().parent / f"base {hidden}"
    if comm.rank == 0:
        model = MODEL if hidden == 24 else GROUPED
        begin(tiny(run={"name": "base", "folder": str(folder), "steps": 6}, model=model), MPI.COMM_SELF)
    comm.Barrier()
    return folder / "base" / "checkpoints" / "step_00000006.h5"


def begin(config: Config, comm) -> Path:
    with StopSignals() as signals:
        path = train(config, comm, signals).checkpoint
    comm.Barrier()
    return path


def tuned(adapter=None, hidden: int = 24, **tables) -> Config:
    """A run with adapters on the base; three microbatches."""
    run = {"start_from": str(base(hidden))} | tables.pop("run", {})
    learning = {"learning_rate": 3e-3, "warmup_steps": 2} | tables.pop("optimizer", {})
    cut = {"microbatches": 3} | tables.pop("pipeline", {})
    finetuning = {"kind": "supervised", "adapter": ADAPTER | (adapter or {})}
    config = to_tables(tiny(model=MODEL if hidden == 24 else GROUPED, optimizer=learning, pipeline=cut, **tables))
    return from_tables(config | {"finetuning": finetuning, "run": config["run"] | run})


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_losses_and_norms_are_those_of_one_process(comm, tables):
    one = losses(tuned(), MPI.COMM_SELF, 5)
    assert one[-1, 0] < one[0, 0]
    np.testing.assert_allclose(losses(tuned(**fitted(tables, comm.size)), comm, 5), one, rtol=1e-5)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("held", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tables", [LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]], ids=str)
def test_a_base_in_few_bits_is_the_same_on_every_layout(comm, tables, held):
    adapter = {"base": held}
    one = losses(tuned(adapter, hidden=128), MPI.COMM_SELF, 4)
    np.testing.assert_allclose(losses(tuned(adapter, hidden=128, **fitted(tables, comm.size)), comm, 4), one, rtol=1e-5)


@pytest.mark.parallel([1, 2])
def test_the_base_stays_and_only_adapters_are_updated(comm):
    def compare(run):
        with Checkpoint.open(base()) as checkpoint:
            for name, weight in run.frozen.items():
                assert weight.grad is None, name
                assert torch.equal(weight, torch.from_numpy(checkpoint.read_whole(f"model/{name}"))), name
        assert all(map(is_adapter, run.parameters))
        return [parameter.abs().max().item() for parameter in run.parameters.values()]

    assert min(losses(tuned(), comm, 3, compare)) > 0


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", ["none", "states", "all"])
def test_messages_carry_gradients_of_adapters_alone(comm, shard):
    """Bytes of a step are in proportion to what is trained."""

    def sent(config):
        with open_run(config, comm) as run:
            run_steps(run, 1)
            before = run.traffic()
            run_steps(run, 1, first=1)
            values = sum(math.prod(shape) for shape in trained_shapes(config.model, config.finetuning.adapter).values())
            return comm.allreduce((run.traffic() - before)[2:6]), values, run.config

    cut = {"pipeline": {"microbatches": 2}, "optimizer": {"shard": shard}, "communication": {"algorithm": "ring"}}
    if shard == "none":
        cut["communication"] = {"algorithm": "rabenseifner"}
    adapters, fewer, config = sent(tuned(**cut))
    plain = dataclasses.replace(config, finetuning=type(config.finetuning)())
    everything, all_values, _ = sent(plain)
    assert fewer == sum(math.prod(shape) for shape in adapter_shapes(config.model, config.finetuning.adapter).values())
    assert adapters[0] > 0
    assert adapters[0] / everything[0] == pytest.approx(fewer / all_values, rel=0.02)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("held", ["compute", "int4"])
def test_a_run_that_was_interrupted_ends_with_the_same_bytes(comm, shared_path, held):
    tables = {"checkpoint": {"every_steps": 2}, "pipeline": {"microbatches": 2}}
    paths = {}
    for name, stops in (("at once", [4]), ("in two", [2, 4])):
        for steps in stops:
            run = {"name": name, "folder": str(shared_path), "steps": steps}
            learning = {"warmup_steps": 9}  # the rate of a step does not depend on how many there are
            paths[name] = begin(tuned({"base": held}, run=run, optimizer=learning, **tables), comm)
    with Checkpoint.open(paths["at once"]) as one, Checkpoint.open(paths["in two"]) as two:
        assert set(one.datasets) == set(two.datasets)
        for name in one.datasets:
            assert one.read_whole(name).tobytes() == two.read_whole(name).tobytes(), name


@pytest.mark.parallel([1, 2])
def test_a_checkpoint_holds_adapters_alone_and_knows_its_base(comm, shared_path):
    path = begin(tuned(run={"folder": str(shared_path), "steps": 1}), comm)
    config = tuned()
    names = set(adapter_shapes(config.model, config.finetuning.adapter))
    with Checkpoint.open(path) as checkpoint, Checkpoint.open(base()) as whole:
        kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        assert set(checkpoint.datasets) == {f"{kind}/{name}" for kind in kinds for name in names} | {"tokenizer"}
        assert checkpoint.attributes["run/base"] == fingerprint(whole, None)


@pytest.mark.parallel([1, 2])
def test_the_base_may_move_but_not_change(comm, shared_path):
    """The folder that `convert` makes of a checkpoint has the same values, so it is the same base."""
    moved, other, first = shared_path / "moved", shared_path / "other.h5", base()
    if comm.rank == 0:
        shutil.copy(first, shared_path / "base.h5")
        convert(first, moved, MPI.COMM_SELF)
        changed = tiny(run={"name": "o", "folder": str(shared_path), "steps": 1, "seed": 5}, model=MODEL)
        shutil.copy(begin(changed, MPI.COMM_SELF), other)
    comm.Barrier()
    with Folder.open(moved, comm) as folder, Checkpoint.open(base()) as checkpoint:
        assert fingerprint(folder, comm) == fingerprint(checkpoint, None)
    run = {"name": "r", "folder": str(shared_path)}
    begin(tuned(run=run | {"steps": 1, "start_from": str(shared_path / "base.h5")}), comm)
    if comm.rank == 0:
        (shared_path / "base.h5").unlink()
    comm.Barrier()
    with pytest.raises(ConfigError, match="is not there, and adapters mean nothing without it"):
        begin(tuned(run=run | {"steps": 2, "start_from": str(shared_path / "base.h5")}), comm)
    with pytest.raises(ConfigError, match="holds adapters of weights with the fingerprint"):
        begin(tuned(run=run | {"steps": 2, "start_from": str(other)}), comm)
    assert begin(tuned(run=run | {"steps": 2, "start_from": str(moved)}), comm).name == "step_00000002.h5"


REFUSED = {
    "no beginning": ({"run": {"start_from": ""}}, "without run.start_from"),
    "nothing to tune": ({"finetuning": {"kind": "none", "adapter": ADAPTER}}, "adapters change a model"),
    "a compiler": ({"model": {**MODEL, "compile": True}}, "finetuning.adapter.rank = 3"),
    "a group that tp cuts": (
        {"mesh": {"tp": 2}, "finetuning": {"kind": "supervised", "adapter": ADAPTER | {"base": "int8"}}},
        "inside a group of 64 inputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said_before_any_work(case):
    tables, said = REFUSED[case]
    config = to_tables(tuned())
    with pytest.raises(ConfigError, match=said):
        from_tables({**config, **{name: config[name] | table for name, table in tables.items()}})


@pytest.mark.parallel([1])
def test_adapters_of_another_shape_do_not_go_on(comm, shared_path):
    run = {"name": "r", "folder": str(shared_path)}
    path = begin(tuned(run=run | {"steps": 1}), comm)
    for changed in ({"rank": 4}, {"alpha": 1.0}, {"targets": ["query"]}, {"base": "int8"}):
        with pytest.raises(ConfigError, match=f"finetuning.adapter.{next(iter(changed))}"):
            begin(tuned(changed, run=run | {"steps": 2}), comm)
    with pytest.raises(ConfigError, match="holds adapters alone"):
        begin(tuned(run={"name": "on top", "folder": str(shared_path), "steps": 1, "start_from": str(path)}), comm)
