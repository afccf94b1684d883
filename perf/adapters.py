"""Memory and time of a step that trains all weights, beside one that trains adapters on a base held in several ways.

    python perf/adapters.py > perf/adapters.txt

A model of Llama's wiring, 26 million parameters, in one process: bytes of tensors counted (training/memory.py) and
predicted (`hpcllm memory`), and the fastest of a few steps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcllm.config.schema import Config, from_tables
from hpcllm.data.prepare import PrepareOptions, prepare
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train
from hpcllm.training.memory import STAYS, STEP, counting, measured, predicted
from hpcllm.training.setup import open_run
from hpcllm.training.step import forward_backward

MODEL = {"layers": 8, "hidden": 512, "heads": 8, "ffn": 1408, "max_sequence": 256}
RANK, STEPS = 16, 4
HELD = ("", "compute", "bf16", "int8", "int4")  # "": all weights are trained


def run_file(folder: Path, start: Path | None, held: str) -> Config:
    """Make the run that begins with a checkpoint; without one, the run that makes it."""
    adapter: dict[str, Any] = {"rank": RANK if held else 0, "base": held or "compute"}
    return from_tables(
        {
            "run": {"name": "base", "folder": str(folder), "steps": 1, "start_from": str(start or "")},
            "model": MODEL,
            "data": {"store": str(folder / "store.h5"), "sequence_length": 256, "global_batch": 4},
            "checkpoint": {"asynchronous": False},
            "log": {"trackers": []},
            "finetuning": {"kind": "supervised" if held else "none", "adapter": adapter},
        }
    )


def step_of(config: Config) -> dict[str, float]:
    """Bytes of one step, counted and predicted, and the seconds of the fastest of a few that are not counted."""
    with open_run(config, MPI.COMM_SELF) as run:
        with counting(run, wanted=True) as live:
            forward_backward(run, 0, 0)
        run.optimizer.update(1e-3, 1.0)
        assert live is not None
        found, told, seconds = measured(run, live.peak), predicted(run), []
        for step in range(1, STEPS):
            began_s = time.perf_counter()
            forward_backward(run, step, 4 * step)
            run.optimizer.update(1e-3, 1.0)
            seconds.append(time.perf_counter() - began_s)
    states = [sum(sizes[kind] for kind in STAYS) for sizes in (found, told)]
    return dict(zip(("states", "states_predicted"), states, strict=True)) | {
        "step": found[STEP], "step_predicted": told[STEP], "seconds": min(seconds)
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name, StopSignals() as signals:
        folder = Path(name)
        words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "sum", "the", "\n"], 40000)
        (folder / "a.txt").write_text(" ".join(words))
        options = PrepareOptions(
            inputs=(folder / "a.txt",), output=folder / "store.h5", vocabulary=300, validation_fraction=0
        )
        prepare(options, MPI.COMM_SELF)
        base = train(run_file(folder, None, ""), MPI.COMM_SELF, signals).checkpoint
        print("trained, base          states MB (predicted)   a step besides MB (predicted)   step s")
        for held in HELD:
            found = step_of(run_file(folder, base, held))
            sizes = [found[key] / 1e6 for key in ("states", "states_predicted", "step", "step_predicted")]
            what = f"adapters, {held}" if held else "all weights"
            print("{:22} {:9.1f} ({:.1f})   {:14.1f} ({:.1f})".format(what, *sizes), f"{found['seconds']:16.2f}")


if __name__ == "__main__":
    main()
