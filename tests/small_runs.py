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

from hpcllm import config as configs
from hpcllm.assemble import Parts, assemble
from hpcllm.config import Config
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.optim.learning_rate import learning_rate
from hpcllm.step import forward_backward
from hpcllm.train import _agree, _update
from hpcllm.wishes import NOTHING


@cache
def store() -> Path:
    """A token store with something to learn in it. Collective over all ranks the first time."""
    world = MPI.COMM_WORLD
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="hpcllm test ") if world.rank == 0 else None))
    if world.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        generator = np.random.default_rng(0)
        words = ["alpha", "beta", "gamma", "delta", "sum", "of", "ranks", "the", "\n"]
        for i in range(20):
            text = " ".join(generator.choice(words, 400))
            (folder / f"{i}.txt").write_text(f"document {i} {text}")
    world.Barrier()
    output = folder / "store.h5"
    prepare(PrepareOptions(inputs=(folder,), output=output, vocabulary=290, validation_fraction=0.2), world)
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
        "log": {"every_steps": 1, "tensorboard": False},
        "limits": {"stall_s": 15},
    }
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table}
    return configs.from_tables(base)


def losses(
    config: Config, comm: MPI.Intracomm, steps: int | None = None, then: Callable[[Parts], Any] | None = None
) -> Any:
    """(steps, 2) loss and gradient norm of each step of a run; or what `then` makes of its parts afterwards."""
    with assemble(config, comm) as parts:
        seen = run_steps(parts, config.run.steps if steps is None else steps)
        return then(parts) if then else seen


def run_steps(parts: Parts, steps: int, first: int = 0) -> np.ndarray:
    config, seen = parts.config, []
    for step in range(first, first + steps):
        before = parts.traffic()
        local = forward_backward(parts, step, step * config.data.global_batch)
        agreed = _agree(parts, local, NOTHING, parts.traffic() - before)
        assert math.isfinite(agreed.loss)
        assert _update(parts, agreed.gradient_norm, learning_rate(step, config.run.steps, config.optimizer))
        seen.append((agreed.loss, agreed.gradient_norm))
    return np.array(seen)
