"""Small runs that learn from rewards: made problems, weights to begin with, and steps without logs and checkpoints."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import small_runs
from mpi4py import MPI

from hpcllm.config.schema import Config, RewardConfig
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.evaluation.problems import lines_of, problems
from hpcllm.finetuning.grpo import Grpo
from hpcllm.finetuning.objectives import objective_of
from hpcllm.finetuning.reward_process import Scored
from hpcllm.optim.adamw import learning_rate
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train
from hpcllm.training.requests import NO_REQUESTS
from hpcllm.training.resume import resume
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import agree, forward_backward, update

SEQUENCE = 28
SHAPE = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44, "max_sequence": 64}


def by_length(_: RewardConfig, rows: Sequence[Scored]) -> list[float]:
    """Reward texts by their length, in three grades; what any weights get something for."""
    return [len(row.text) % 3 / 2 for row in rows]


@cache
def store() -> Path:
    """A store of lines of problems. Collective over all ranks the first time."""
    world, folder = MPI.COMM_WORLD, small_runs.store().parent
    rows, output = folder / "problems.jsonl", folder / "problems.h5"
    if world.rank == 0:
        lines = list(lines_of(problems("copy", 2, 300, 1, "train")))
        rows.write_text(
            "".join(json.dumps({"text": a + b}) + "\n" for a, b in zip(lines[::2], lines[1::2], strict=True))
        )
    world.Barrier()
    prepare(PrepareOptions(inputs=(rows,), output=output, vocabulary=290, validation_fraction=0.1), world)
    return output


@cache
def start(steps: int = 10) -> Path:
    """A checkpoint of a model that has read a few lines. Collective over all ranks the first time."""
    world, name = MPI.COMM_WORLD, f"start {steps}"
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": name, "folder": str(store().parent / "runs"), "steps": steps},
        "model": SHAPE,
        "data": {"store": str(store()), "sequence_length": SEQUENCE, "global_batch": 32, "packing": "best-fit"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5},
    }
    if world.rank == 0:
        with StopSignals() as signals:
            train(small_runs.tiny(**tables), MPI.COMM_SELF, signals)
    world.Barrier()
    return Path(str(tables["run"]["folder"])) / name / "checkpoints" / f"step_{steps:08}.h5"


def grpo(**tables: dict[str, Any]) -> Config:
    """A run that learns from rewards, in a folder of its own. tables: what it shall have otherwise."""
    reward = {"prompts": "copy:2", "problems": 100, "samples": 4, "tokens": 8}
    finetuning = tables.pop("finetuning", {})
    base: dict[str, dict[str, Any]] = {
        "run": {
            "name": uuid.uuid4().hex,
            "folder": str(store().parent / "runs"),
            "steps": 20,
            "start_from": str(start()),
        },
        "data": {"store": str(store()), "sequence_length": SEQUENCE, "global_batch": 48, "validation_sequences": 9},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 3, "weight_decay": 0.0},
        "pipeline": {"microbatches": 2},
        "communication": {"bucket_mib": 0.02},
        "finetuning": {"kind": "grpo", **finetuning, "reward": reward | finetuning.get("reward", {})},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1, "trackers": []},
        "limits": {"stall_s": 15},
    }
    return small_runs.with_tables(base, tables)


def train_grpo(
    config: Config, comm: MPI.Intracomm, score: Callable[[RewardConfig, Sequence[Scored]], list[float]] | None = None
) -> Any:
    """Train as the command does; returns the summary. score: None: as the run file says. Collective over comm."""
    objective = Grpo(config.finetuning.reward, score) if score else objective_of(config)
    with StopSignals() as signals:
        return train(config, comm, signals, objective=objective)


def begin(run: RunContext) -> None:
    """Begin a run whose folder nobody has locked. Collective over the mesh."""
    run.run_folder.mkdir(parents=True, exist_ok=True)
    resume(run)


@dataclass
class Curve:
    """What a run has made. figures: (steps, 2 + figures), loss and gradient norm before them."""

    figures: np.ndarray
    samples: list[str]  # hash of the texts of each step
    difference: float  # the largest one between sampler and training
    held_out: dict[str, float]


def curve(
    config: Config, comm: MPI.Intracomm, steps: int, then: Callable[[RunContext], None] = lambda _: None
) -> Curve:
    """Run so many steps, rewarded by length, and validate. Collective over comm, whose ranks agree on a folder."""
    config = comm.bcast(config)
    with open_run(config, comm, Grpo(config.finetuning.reward, by_length)) as run:
        begin(run)
        rows, samples = [], []
        for step in range(steps):
            before = run.traffic()
            local = forward_backward(run, step, step * config.data.global_batch)
            agreed = agree(run, local, NO_REQUESTS, run.traffic() - before)
            assert update(run, agreed.gradient_norm, learning_rate(step, config.run.steps, config.optimizer))
            rows.append((agreed.loss, agreed.gradient_norm, *agreed.figures))
            samples.append(agreed.samples)
        difference = run.objective.facts(run)["sampler_difference_most"]
        run.optimizer.settle()
        checked = run.objective.validate(run)
        assert checked
        then(run)
        return Curve(np.array(rows), samples, difference, checked.figures)
