"""A small run of the real trainer, for laws that put the student's function into it. Imports torch.

text of random words --prepare--> token store --train--> losses: with the student's function as with ours
                                              --one_step--> timed by a lab
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.config.schema import Config, from_tables
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.optim.adamw import learning_rate
from hpcllm.training.requests import NO_REQUESTS
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import agree, forward_backward, update

WORDS = ("ring", "rank", "stage", "chunk", "sum", "of", "the", "\n")
TEXT_WORDS = 4000


def make_store(folder: Path, comm: MPI.Intracomm) -> Path:
    """Make a small token store in a folder that all ranks see. Collective over comm."""
    if comm.rank == 0:
        drawn = random.Random(0)
        (folder / "text.txt").write_text(" ".join(drawn.choices(WORDS, k=TEXT_WORDS)), encoding="utf-8")
    comm.Barrier()
    output = folder / "store.h5"
    prepare(PrepareOptions(inputs=(folder / "text.txt",), output=output, vocabulary=280, validation_fraction=0.1), comm)
    return output


def small_config(store: Path, steps: int, **tables: dict[str, Any]) -> Config:
    """Make the configuration of a small model's run; tables of the run file go first."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "lab", "folder": str(store.parent / "runs"), "steps": steps},
        "model": {"layers": 4, "hidden": 16, "heads": 2, "ffn": 32, "max_sequence": 16},
        "data": {"store": str(store), "sequence_length": 16, "global_batch": 12},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "checkpoint": {"every_steps": 0},
        "log": {"trackers": []},
    }
    names = dict.fromkeys([*base, *tables])
    return from_tables({name: base.get(name, {}) | tables.get(name, {}) for name in names})


def train_losses(store: Path, comm: MPI.Intracomm, steps: int, **tables: dict[str, Any]) -> list[float]:
    """Train a small model and return the loss of each step; tables of the run file go first. Collective over comm."""
    config = small_config(store, steps, **tables)
    with open_run(config, comm) as run:
        return [one_step(run, step, step * config.data.global_batch) for step in range(steps)]


def one_step(run: RunContext, step: int, position: int) -> float:
    """Do a step with the samples from `position`, and return its loss. Collective over the run's ranks."""
    before, config = run.traffic(), run.config
    agreed = agree(run, forward_backward(run, step, position), NO_REQUESTS, run.traffic() - before)
    update(run, agreed.gradient_norm, learning_rate(step, config.run.steps, config.optimizer))
    return float(agreed.loss)
