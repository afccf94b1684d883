"""What a checkpoint costs the training: seconds of a step lost to one, behind the training and in the loop.

    mpirun -n 2 python perf/checkpoint_overhead.py STORE [--rounds 9] [--steps 12] [--hidden 512]

    none     step step step step ... step                         a block: so many steps, timed on all ranks together
    thread   step COPY step step ... step, then the write's end    (written behind these steps)
    loop     step WRITE step step ... step

Blocks of the three kinds take turns within one run, so that a machine that is slower for a while is so for all. A
block's seconds less those of the blocks without are what one checkpoint costs; over an interval that gives the share.
Writes checkpoint_overhead.json and checkpoint_overhead.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.config import schema as configs
from hpcllm.optim.adamw import learning_rate
from hpcllm.training.run_lock import lock_run
from hpcllm.training.saving import Saving, open_saving
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import forward_backward

HERE = Path(__file__).resolve().parent
KINDS = ("none", "thread", "loop")
INTERVALS_S = (60, 300, 900)
GOAL = 0.03


def block(run: RunContext, saving: Saving, kind: str, first: int, steps: int) -> tuple[float, float]:
    """Seconds of `steps` steps, and until the checkpoint that the first one is followed by is whole."""
    config = run.config
    saving.background.asynchronous = kind == "thread"
    run.mesh.world.Barrier()
    start_s = time.perf_counter()
    for step in range(first, first + steps):
        forward_backward(run, step, step * config.data.global_batch)
        run.optimizer.update(learning_rate(step, config.run.steps, config.optimizer), 1.0)
        run.mesh.world.Barrier()  # a run's steps end with a sum over all ranks
        if step == first and kind != "none":
            saving.save(step + 1, (step + 1) * config.data.global_batch, None)
    took_s = time.perf_counter() - start_s
    saving.finish()
    run.mesh.world.Barrier()
    return took_s, time.perf_counter() - start_s


def measure(world: MPI.Intracomm, arguments: argparse.Namespace) -> dict[str, Any]:
    """Collective over world."""
    folder = world.bcast(tempfile.mkdtemp(dir=arguments.folder) if world.rank == 0 else None)
    keys = {
        "run.folder": folder,
        "run.steps": 10**6,
        "model.hidden": arguments.hidden,
        "model.ffn": 4 * arguments.hidden,
        "model.layers": arguments.layers,
        "data.store": arguments.store,
        "data.global_batch": 4 * world.size,
        "checkpoint.keep": 1,
    }
    config = configs.parse("", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    whole_s: list[float] = []
    with open_run(config, world) as run, lock_run(world, run.run_folder, restart=False) as lock:
        with open_saving(run, lock, None, None) as saving:
            first = 0
            for number in range(arguments.rounds + 1):
                for kind in KINDS:
                    took_s, until_s = block(run, saving, kind, first, arguments.steps)
                    first += arguments.steps
                    if number:  # the first round allocates
                        seconds[kind].append(took_s)
                        whole_s += [until_s] if kind == "thread" else []
            newest = saving.newest
            size = newest.stat().st_size if newest else 0
        memory = saving.background.copy_bytes
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(folder)
    return {"seconds": seconds, "until_whole_s": whole_s, "file_bytes": size, "copy_bytes": memory}


def report(found: dict[str, Any], steps: int, ranks: int) -> list[str]:
    seconds = {kind: statistics.median(found["seconds"][kind]) for kind in KINDS}
    step_s = seconds["none"] / steps
    lines = [
        "# What a checkpoint costs the training",
        "",
        f"`mpirun -n {ranks} python perf/checkpoint_overhead.py STORE`: {found['file_bytes'] / 1e6:.0f} MB, steps of "
        f"{step_s:.3f} s on {os.cpu_count()} cores; medians of {len(found['seconds']['none'])} blocks of {steps}.",
        "",
        "| written | seconds lost to one | " + " | ".join(f"share, every {s:g} s" for s in INTERVALS_S) + " |",
        "|---|---|" + "---|" * len(INTERVALS_S),
    ]
    for kind, name in (("thread", "behind the training"), ("loop", "in the loop")):
        lost_s = seconds[kind] - seconds["none"]
        shares = " | ".join(f"{100 * max(0.0, lost_s) / s:.2f} %" for s in INTERVALS_S)
        lines.append(f"| {name} | {lost_s:.3f} | {shares} |")
    lines += [
        "",
        f"Behind the training it was whole {statistics.median(found['until_whole_s']):.2f} s after its block began;",
        f"the copy takes {found['copy_bytes'] / 1e6:.0f} MB of a rank's memory. On a machine where every core",
        "computes, the thread takes its core time from the steps: that is in the seconds lost.",
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a token store, written by `hpcllm prepare`")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", help="where the checkpoints are written (default: the temporary folder)")
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(world, arguments)
    if world.rank == 0:
        lines = report(found, arguments.steps, world.size)
        name = HERE / "checkpoint_overhead"
        name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        name.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
