"""A run begins with the weights that it is told, bit for bit, whatever the layout, and goes on without them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import tiny

from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.layout import MASTER, MODEL
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.state import as_tensor
from hpcllm.config import schema as configs
from hpcllm.config.schema import Config, ModelConfig
from hpcllm.errors import ConfigError, DataError, MeshError
from hpcllm.model.shapes import parameter_shapes
from hpcllm.system.job import StopSignals
from hpcllm.training import loop as train_module
from tests.checkpoint.huggingface.ours import checkpoint_of, values
from tests.model.variants import GPT2, LLAMA

SIZES = {"layers": 4, "hidden": 24, "heads": 4, "ffn": 44, "vocabulary": 301, "max_sequence": 16}
MODELS = {
    "gpt2": ModelConfig(**SIZES, **GPT2),
    "llama": ModelConfig(**SIZES, **LLAMA, kv_heads=2, tied=False),
    "neox": ModelConfig(
        **SIZES, **(GPT2 | {"positions": "rotary", "activation": "gelu"}), tied=False, parallel_residual=True
    ),
}
# dp, pp, tp, shard
LAYOUTS = {
    1: [(1, 1, 1, "none")],
    2: [(2, 1, 1, "states"), (1, 2, 1, "none"), (1, 1, 2, "none"), (2, 1, 1, "all")],
    3: [(3, 1, 1, "states+gradients"), (1, 3, 1, "none")],
    4: [(1, 2, 2, "none"), (2, 1, 2, "states")],
}


def run(source: Path, layout=(0, 1, 1, "none"), steps: int = 1, compute: str = "fp32", **tables) -> Config:
    """A run that learns nothing: what it writes is what it began with."""
    dp, pp, tp, shard = layout
    learning = {"learning_rate": 1e-30, "weight_decay": 0.0, "shard": shard}
    base = configs.to_tables(tiny(optimizer=learning, precision={"compute": compute}))
    base["mesh"] |= {"dp": dp, "pp": pp, "tp": tp, "sequence_parallel": tp > 1}
    base["run"] |= {"start_from": str(source), "steps": steps, "folder": str(source.parent / "runs")}
    return configs.from_tables(base | {"model": {}} | tables)


def train(config: Config, comm) -> Path:
    with StopSignals() as signals:
        path = train_module.train(config, comm, signals).checkpoint
    comm.Barrier()
    return path


def sources_of(name: str, comm, shared_path: Path) -> tuple[ModelConfig, list[Path]]:
    """The same weights as a checkpoint, as a folder, and as the newest of a run, which is an archive."""
    model = MODELS[name]
    newest = shared_path / "a run" / "checkpoints" / "step_00000003.h5"
    if comm.rank == 0:
        convert(checkpoint_of(shared_path / "ours.h5", model), shared_path / "theirs", MPI.COMM_SELF, shard_gb=2e-5)
        compress(shared_path / "ours.h5", newest, None)
    comm.Barrier()
    return model, [shared_path / "ours.h5", shared_path / "theirs", newest.parents[1]]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_begins_with_these_bits_on_any_layout(comm, shared_path, name):
    model, paths = sources_of(name, comm, shared_path)
    for number, layout in enumerate(LAYOUTS[comm.size]):
        path = train(run(paths[(number + comm.size) % 3], layout), comm)
        if comm.rank == 0:
            with Checkpoint.open(path) as checkpoint:
                for name, shape in parameter_shapes(model).items():
                    want = values(f"{MODEL}/{name}", shape)
                    np.testing.assert_array_equal(checkpoint.read_whole(f"{MODEL}/{name}"), want, err_msg=name)
            shutil.rmtree(path.parents[2])
        comm.Barrier()


@pytest.mark.parallel([2])
@pytest.mark.parametrize(("name", "shard"), [("gpt2", "none"), ("neox", "states"), ("llama", "all")])
def test_in_16_bit_the_master_weights_are_those_that_were_read(comm, shared_path, name, shard):
    model, paths = sources_of(name, comm, shared_path)
    path = train(run(paths[1], (2, 1, 1, shard), compute="bf16"), comm)
    if comm.rank == 0:
        with Checkpoint.open(path) as checkpoint:
            for name, shape in parameter_shapes(model).items():
                want = torch.from_numpy(values(f"{MODEL}/{name}", shape))
                held = as_tensor(checkpoint.read_whole(f"{MODEL}/{name}"), "bfloat16")
                assert torch.equal(held, want.bfloat16()), name
                assert torch.equal(torch.from_numpy(checkpoint.read_whole(f"{MASTER}/{name}")), want), name


@pytest.mark.parallel([2])
def test_a_run_goes_on_without_its_beginning(comm, shared_path):
    _, paths = sources_of("neox", comm, shared_path)
    train(run(paths[1], steps=1), comm)
    if comm.rank == 0:
        shutil.rmtree(paths[1])
    comm.Barrier()
    assert train(run(paths[1], steps=2), comm).name == "step_00000002.h5"


REFUSED = {
    "another shape": ({"model": {"layers": 5, "hidden": 24}}, ConfigError, "model.layers = 5, there 4"),
    "a sequence too long": ({"data": {"sequence_length": 17}}, ConfigError, "max_sequence = 16"),
    "layers that do not add up": ({"pipeline": {"layers": [3]}}, ConfigError, "model.layers = 4"),
    "a layout that does not divide": ({"mesh": {"tp": 3}}, MeshError, "3"),
    "a file of another kind": ({"run": {"start_from": __file__}}, ConfigError, "is no checkpoint of ours"),
    "nothing there": ({"run": {"start_from": "no such folder"}}, ConfigError, "'no such folder' is not there"),
}


@pytest.mark.parallel([3])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_work(comm, shared_path, case):
    tables, kind, said = REFUSED[case]
    if comm.rank == 0:
        checkpoint_of(shared_path / "ours.h5", MODELS["llama"])
    comm.Barrier()
    base = configs.to_tables(run(shared_path / "ours.h5"))
    changed = {name: base[name] | table for name, table in tables.items() if name != "model"}
    with pytest.raises(kind, match=said):
        train(configs.from_tables(base | {"model": tables.get("model", {})} | changed), comm)
    comm.Barrier()
    assert not (shared_path / "runs").exists()


@pytest.mark.parallel([1])
def test_a_model_that_is_said_as_well_must_be_the_one(comm, shared_path):
    path = checkpoint_of(shared_path / "ours.h5", MODELS["llama"])
    same = dataclasses.asdict(MODELS["llama"]) | {"head_channels": 6, "vocabulary": 0}
    assert train(run(path, model=same), comm).exists()
    convert(path, shared_path / "theirs", comm)
    (shared_path / "theirs" / "config.json").unlink()
    again = configs.to_tables(run(shared_path / "theirs"))["run"] | {"name": "b"}
    with pytest.raises(DataError, match=r"has no config\.json"):
        train(run(shared_path / "theirs", run=again), comm)
