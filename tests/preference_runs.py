"""Small runs on preferences: pairs made by a rule, weights to begin with, and steps without logs and checkpoints."""

from __future__ import annotations

import json
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import small_runs
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.config.schema import Config
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.finetuning.objectives import objective_of
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train
from hpcllm.training.resume import resume
from hpcllm.training.setup import open_run

GOOD, BAD = ("plum", "fig", "pear"), ("mud", "ash", "rust")
SEQUENCE = 80  # in which nearly every pair fits


def pairs(count: int) -> list[dict[str, str]]:
    """Rows in which the better answer has fruit in it; every twentieth pair is a long one."""
    draw = np.random.default_rng(5)

    def words(kind: tuple[str, ...], least: int) -> str:
        return " ".join(draw.choice(kind, least + draw.integers(1, 6)))

    return [
        {
            "prompt": f"number {i}, {words(GOOD + BAD, 0)}?",
            "chosen": words(GOOD, 60 * (i % 20 == 7)),
            "rejected": words(BAD, 0),
        }
        for i in range(count)
    ]


@cache
def store() -> Path:
    """A store of 120 pairs, a quarter of them held out. Collective over all ranks the first time."""
    world, folder = MPI.COMM_WORLD, small_runs.store().parent
    rows, output = folder / "pairs.jsonl", folder / "pairs.h5"
    if world.rank == 0:
        rows.write_text("".join(json.dumps(row) + "\n" for row in pairs(120)))
    world.Barrier()
    options = PrepareOptions(inputs=(rows,), output=output, vocabulary=300, validation_fraction=0.25, template="chatml")
    prepare(options, world)
    return output


@cache
def start() -> Path:
    """A Hugging Face folder of a model that has learned a little. Collective over all ranks the first time."""
    world, folder = MPI.COMM_WORLD, small_runs.store().parent / "start"
    texts, output = folder.parent / "texts.jsonl", folder.parent / "texts.h5"
    if world.rank == 0:
        rows = [{"text": f"{row['prompt']} {row['chosen']} {row['rejected']}"} for row in pairs(120)]
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(PrepareOptions(inputs=(texts,), output=output, tokenizer=store()), world)
    if world.rank == 0:
        shape = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44}
        config = small_runs.tiny(
            model={**shape, "vocabulary": 300, "max_sequence": 512},
            data={"store": str(output)},
            run={"name": "start", "folder": str(folder.parent / "runs"), "steps": 10},
        )
        with StopSignals() as signals:
            summary = train(config, MPI.COMM_SELF, signals)
        assert summary.checkpoint
        convert(summary.checkpoint, folder, None)
    world.Barrier()
    return folder


def dpo(**tables: dict[str, Any]) -> Config:
    """A run that learns from the pairs, in a folder of its own. tables: what it shall have otherwise."""
    base: dict[str, dict[str, Any]] = {
        "run": {
            "name": uuid.uuid4().hex,
            "folder": str(store().parent / "runs"),
            "steps": 20,
            "start_from": str(start()),
        },
        "data": {"store": str(store()), "sequence_length": SEQUENCE, "global_batch": 12, "validation_sequences": 17},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 3},
        "pipeline": {"microbatches": 2},
        "communication": {"bucket_mib": 0.02},
        "finetuning": {"kind": "dpo"},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1, "trackers": []},
        "limits": {"stall_s": 15},
    }
    return small_runs.with_tables(base, tables)


def train_dpo(config: Config, comm: MPI.Intracomm, **options: Any) -> Any:
    """Train as the command does; returns the summary. Collective over comm."""
    with StopSignals() as signals:
        return train(config, comm, signals, objective=objective_of(config), **options)


def curve(config: Config, comm: MPI.Intracomm, steps: int) -> np.ndarray:
    """(steps, 2 + figures): loss, gradient norm and figures of each step, and behind them those of held-out pairs.

    Collective over comm; the ranks agree on a folder of the run.
    """
    with open_run(comm.bcast(config), comm, objective_of(config)) as run:
        resume(run)
        found = small_runs.run_steps(run, steps)
        run.optimizer.settle()
        checked = run.objective.validate(run)
        assert checked
        return np.array([*found, [checked.loss, 0.0, *checked.figures.values()]])
