"""Small runs for tests: a store that is made once a process, and steps without logs, checkpoints and validation."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.config import schema as configs
from hpcllm.config.schema import Config
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.optim.adamw import learning_rate
from hpcllm.training.requests import NO_REQUESTS
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import agree, forward_backward, update


@cache
def store() -> Path:
    """A token store with something to learn in it. Collective over all ranks the first time."""
    world = MPI.COMM_WORLD
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="hpcllm test ") if world.rank == 0 else None))
    if world.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_store(folder, world)


def make_store(folder: Path, comm: MPI.Intracomm, documents: int = 20, vocabulary: int = 290) -> Path:
    """A token store in a folder that all ranks see, with documents of a few words in random order. Collective."""
    if comm.rank == 0:
        generator = np.random.default_rng(0)
        words = ["alpha", "beta", "gamma", "delta", "sum", "of", "ranks", "the", "\n"]
        for i in range(documents):
            text = " ".join(generator.choice(words, 400))
            (folder / f"{i}.txt").write_text(f"document {i} {text}")
    comm.Barrier()
    output = folder / "store.h5"
    prepare(PrepareOptions(inputs=(folder,), output=output, vocabulary=vocabulary, validation_fraction=0.2), comm)
    return output


def tiny(**tables: dict[str, Any]) -> Config:
    """A run of a model with odd sizes; tables: what it shall have otherwise."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "folder": str(store().parent / "runs"), "steps": 20},
        "model": {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44, "max_sequence": 16},
        "data": {"store": str(store()), "sequence_length": 16, "global_batch": 12, "validation_sequences": 7},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5},
        "communication": {"bucket_mib": 0.02},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1, "trackers": []},
        "limits": {"stall_s": 15},
    }
    return with_tables(base, tables)


def with_tables(base: dict[str, dict[str, Any]], tables: dict[str, dict[str, Any]]) -> Config:
    """The run of these tables, where the keys of `tables` go before those of `base`."""
    return configs.from_tables({name: base.get(name, {}) | tables.get(name, {}) for name in {**base, **tables}})


def dividing(tables: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Tables of a run; without their layout where it does not divide these ranks, so that replicas are left."""
    return {} if ranks % math.prod(tables.get("mesh", {}).get(axis, 1) for axis in ("pp", "tp")) else tables


def fitted(tables: dict[str, Any], ranks: int) -> dict[str, Any]:
    """As dividing; and on 3 ranks 2 microbatches, as each replica has 4 of 12 samples there."""
    tables = dividing(tables, ranks)
    if ranks == 3:
        tables = tables | {"pipeline": {**tables.get("pipeline", {}), "microbatches": 2}}
    return tables


def losses(
    config: Config, comm: MPI.Intracomm, steps: int | None = None, then: Callable[[RunContext], Any] | None = None
) -> Any:
    """(steps, 2) loss and gradient norm of each step of a run; or what `then` makes of its RunContext afterwards."""
    with open_run(config, comm) as run:
        seen = run_steps(run, config.run.steps if steps is None else steps)
        return then(run) if then else seen


def run_steps(run: RunContext, steps: int, first: int = 0) -> np.ndarray:
    """(steps, 2 + figures) loss, gradient norm and the objective's figures of each step."""
    config, seen = run.config, []
    for step in range(first, first + steps):
        before = run.traffic()
        local = forward_backward(run, step, step * config.data.global_batch)
        agreed = agree(run, local, NO_REQUESTS, run.traffic() - before)
        assert math.isfinite(agreed.loss)
        assert update(run, agreed.gradient_norm, learning_rate(step, config.run.steps, config.optimizer))
        seen.append((agreed.loss, agreed.gradient_norm, *agreed.figures))
    return np.array(seen)
