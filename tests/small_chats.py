"""Small fine-tunings for tests: chats made by rule, a base model that knows their tokens, runs that begin with it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from small_runs import store, with_tables

from hpcllm.config.schema import Config
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train

ADDED = {"add": "+", "subtract": "-", "multiply": "*"}
USUAL = 60  # conversations of a store
MODEL = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 44, "max_sequence": 400}


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of one to three turns, of unequal lengths, some with a system message."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": f"assistant {number}"}] if draw.random() < 0.3 else []
        for _ in range(draw.integers(1, 4)):
            word, (a, b) = str(draw.choice(list(ADDED))), draw.integers(1, 99, 2).tolist()
            messages.append({"role": "user", "content": f"please {word} {a} and {b}" + ", now" * int(draw.integers(3))})
            messages.append({"role": "assistant", "content": f"{a} {ADDED[word]} {b}"})
        found.append({"messages": messages})
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@cache
def chats(template: str = "chatml", count: int = USUAL, held_out: float = 0.1) -> Path:
    """A store of chats, all with the tokenizer of the usual one. Collective over all ranks the first time."""
    folder = store().parent / f"chats {template} {count}"
    options = PrepareOptions(
        inputs=(folder / "chats.jsonl",),
        output=folder / "chats.h5",
        vocabulary=300,
        validation_fraction=held_out,
        template=template,
        tokenizer=None if count == USUAL else chats(template),
    )
    if MPI.COMM_WORLD.rank == 0:
        folder.mkdir()
        write_rows(folder / "chats.jsonl", conversations(count))
    MPI.COMM_WORLD.Barrier()
    prepare(options, MPI.COMM_WORLD)
    return options.output


@cache
def base(template: str = "chatml") -> Path:
    """A checkpoint of a model that has seen a few of the chats as text. Collective over all ranks the first time."""
    config = finetuning(
        template,
        run={"name": f"base {template}", "start_from": "", "steps": 2},
        model=MODEL,
        finetuning={"kind": "none"},
        checkpoint={"every_steps": 2},
    )
    if MPI.COMM_WORLD.rank == 0:
        run(config, MPI.COMM_SELF)
    MPI.COMM_WORLD.Barrier()
    return folder_of(config) / "checkpoints" / "step_00000002.h5"


def finetuning(template: str = "chatml", **tables: dict[str, Any]) -> Config:
    """A supervised run on the chats, whose rows hold several conversations each; tables: what it shall have else."""
    begin = tables.get("run", {}).get("start_from")
    start: dict[str, dict[str, Any]] = {
        "run": {
            "name": "tuned",
            "folder": str(store().parent / "runs"),
            "steps": 4,
            "start_from": str(base(template)) if begin is None else begin,
        },
        "data": {
            "store": str(chats(template)),
            "sequence_length": 400,
            "global_batch": 12,
            "packing": "best-fit",
            "validation_sequences": 3,
        },
        "finetuning": {"kind": "supervised"},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
        "pipeline": {"microbatches": 3},
        "communication": {"bucket_mib": 0.02},
        "checkpoint": {"every_steps": 0, "keep": 9},
        "log": {"every_steps": 1, "trackers": []},
        "limits": {"stall_s": 15},
    }
    return with_tables(start, tables)


def run(config: Config, comm: MPI.Intracomm, restart: bool = False) -> list[dict[str, Any]]:
    """Make a run; the records of its steps. Collective over comm."""
    with StopSignals() as signals:
        train(config, comm, signals, restart)
    return steps_of(config)


def steps_of(config: Config) -> list[dict[str, Any]]:
    records = map(json.loads, (folder_of(config) / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if "loss" in record]


def folder_of(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name
