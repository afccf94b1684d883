"""Run folders as `train` leaves them, of runs that never were: any length, any number of starts, any fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from hpcllm.config.schema import from_tables, to_tables
from hpcllm.training.step_timer import BETWEEN, PARTS

KINDS = ("gradients", "parameters", "forward", "backward")


def start(step: int, scope: str = "whole nodes (pm_counters)", **more: Any) -> dict[str, Any]:
    about = {
        "time": "2026-03-04T05:06:07+00:00",
        "ranks": 16,
        "nodes": 2,
        "hosts": "n[1-2]",
        "mesh": {"dp": 4, "pp": 4, "tp": 1},
        "devices": 16,
        "device": "cuda",
        "device_name": "AMD Instinct MI250X (64 GB)",
        "threads": 7,
        "bubble": 0.2,
        "machine": "frontier",
        "slurm": {"job_id": "4711", "job_partition": "batch"},
        "commit": "0123456789ab",
        "versions": {"hpcllm": "0.1.0", "torch": "2.9.0", "mpi": "MPICH 4.2"},
        "energy_scope": scope,
    }
    return {"step": step, "start": about | more}


def memory(step: int, stages: int = 4) -> dict[str, Any]:
    sizes = {"parameters": 2.1e9, "gradients": 4.2e9, "optimizer": 1.6e9, "step": 3.3e9}
    of_stages = [
        {f"{kind}_memory_bytes": int(size * (1 - 0.1 * k)) for kind, size in sizes.items()}
        | {f"{kind}_memory_predicted_bytes": int(size * (1 - 0.11 * k)) for kind, size in sizes.items()}
        for k in range(stages)
    ]
    return {"step": step, **of_stages[0], "memory_stages": of_stages}


def logged(step: int, seed: float = 0.0, slow: float = 1.0) -> dict[str, Any]:
    """One logged step; everything in it follows from the step."""
    wave = math.sin(0.37 * step + seed)
    step_s = slow * (2.0 + 0.05 * wave) * (8 if step == 10 else 1)
    shares = {"compute": 0.62, "optimizer": 0.03, "communication": 0.1, "bubble": 0.18, "input": 0.02, "other": 0.05}
    record = {
        "step": step,
        "loss": 2.2 + 8 / (1 + 0.01 * step) + 0.1 * wave,
        "learning_rate": 3e-4 * min(1, step / 200),
    }
    record |= {"grad_norm": 1 + 0.3 * wave, "step_s": step_s, "tokens_per_s": 1e6 / step_s}
    record |= {"tflops_per_device": 120 / step_s, "mfu": 0.6 / step_s, "communication_share": 0.2, "eta_s": 100.0}
    for k, kind in enumerate(KINDS):
        ratio = (3.97, 2.1, 1.37, 1.4)[k] if step > 20 else 1.0
        record |= {f"{kind}_plain_bytes": 4e8 * (k + 1), f"{kind}_bytes": 4e8 * (k + 1) / ratio, f"{kind}_ratio": ratio}
    record |= {f"time_{part}_s": shares[part] * step_s for part in PARTS}
    record |= {f"time_{part}_s": 0.01 * (k + 1) * step_s for k, part in enumerate(BETWEEN)}
    hours = 2.2 * slow * step / 3600
    record |= {"node_hours": 2 * hours, "gpu_hours": 16 * hours, "energy_kwh": 2 * hours * (2.4 + 0.1 * wave)}
    record |= {"energy_gpus_kwh": 3.6 * hours, "energy_tokens": 1_000_000 * step}
    record |= {"tokens_per_kwh": 1_000_000 * step / record["energy_kwh"], "cost": record["energy_kwh"] * 0.3 + hours}
    return record | {"memory_gb": 11.3, "samples": "83d0ee7e"}


def write(
    folder: Path,
    steps: int = 1000,
    every: int = 10,
    starts: tuple[int, ...] = (0,),
    end: bool = True,
    seed: float = 0.0,
    slow: float = 1.0,
    **tables: dict[str, Any],
) -> Path:
    """A run folder. starts: the steps that its starts went on from."""
    folder.mkdir(parents=True)
    base = {"run": {"name": folder.name, "steps": 1000}, "data": {"global_batch": 512, "sequence_length": 2048}}
    config = from_tables({**base, "model": {"vocabulary": 4096, "max_sequence": 2048}, **tables})
    (folder / "run.toml").write_text(tomli_w.dumps(to_tables(config)), encoding="utf-8")
    lines: list[dict[str, Any]] = [start(0), memory(1)]
    for step in range(every, steps + 1, every):
        lines += [start(step - every), memory(step)] if step - every in starts[1:] else []
        lines.append(logged(step, seed, slow))
        if step % 100 == 0:
            lines.append({"step": step, "validation_loss": lines[-1]["loss"] + 0.1, "bits_per_byte": 1.2})
        if step % 250 == 0:
            size = {"checkpoint_bytes": 88_000_000_000, "checkpoint_gb_s": 12.5}
            lines.append({"step": step, "checkpoint_s": 7.0, "checkpoint_wait_s": 0.8, **size})
    if end:
        total = {key: value for key, value in lines[-1].items() if key in ("node_hours", "energy_kwh")}
        lines.append({"step": steps, "end": {"time": "2026-03-04T09:00:00+00:00", "stopped_by": ""}, **total})
    write_lines(folder, lines)
    return folder


def write_lines(folder: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text + torn, encoding="utf-8")


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def write_many(folder: Path, lines: int) -> Path:
    """A run of very many logged steps, quickly."""
    write(folder, steps=100)
    losses = 2 + np.random.default_rng(0).standard_normal(lines)
    record = json.dumps(logged(10)).split('"loss": ')
    before, after = record[0].replace('"step": 10', '"step": %d'), record[1].split(",", 1)[1]
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        for k, loss in enumerate(losses.tolist()):
            file.write(before % (101 + k) + f'"loss": {loss},' + after + "\n")
    return folder
