"""Step time of the `tiny` run in several layouts, beside a plain PyTorch loop: same model, data and batch.

    [HPCLLM_MPI=openmpi] python perf/step_time.py STORE [--repeats 5] [--steps 30]

The variants take turns, `repeats` times over, each in a process (or two) of its own; a variant's figure is the median
of all its steps but the first five of each turn. Ratios are to the plain loop with one thread, so 0.5 is the ideal of
two ranks on two cores. Writes step_time_<mpi>.json and .md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from peer_runs import Ranks, our_run, peer_run

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 5
VARIANTS: dict[str, tuple[int, int, dict[str, Any] | None]] = {  # ranks, threads a rank, keys; None: the plain loop
    "plain PyTorch loop, 1 thread": (1, 1, None),
    "one rank, 1 thread": (1, 1, {"mesh.pp": 1, "pipeline.microbatches": 1}),
    "dp=2, 1 thread a rank": (2, 1, {"mesh.pp": 1, "pipeline.microbatches": 1}),
    "pp=2, 4 microbatches": (2, 1, {"mesh.pp": 2, "pipeline.microbatches": 4}),
    "pp=2, 8 microbatches": (2, 1, {"mesh.pp": 2, "pipeline.microbatches": 8}),
    "dp=2 x pp=2, 4 ranks, 4 microbatches": (4, 1, {"mesh.pp": 2, "pipeline.microbatches": 4}),
    "plain PyTorch loop, 2 threads": (1, 2, None),
    "one rank, 2 threads": (1, 2, {"mesh.pp": 1, "pipeline.microbatches": 1}),
}


def turn(name: str, store: str, steps: int) -> list[float]:
    """Seconds of each step."""
    count, threads, keys = VARIANTS[name]
    ranks, common = Ranks(count, on_cluster=False, threads=threads), {"data.store": store}
    if keys is None:
        run = peer_run(ranks, "", common, steps, keeps_memory=False)
    else:
        run = our_run(ranks, common | keys, steps)
    return [step["step_s"] for step in run]


def table(results: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(seconds) for name, seconds in results.items()}
    base = medians["plain PyTorch loop, 1 thread"]
    rows = ["| variant | median step, s | fastest | slowest | ratio to plain, 1 thread |", "|---|---:|---:|---:|---:|"]
    for name, seconds in results.items():
        numbers = f"{medians[name]:.4f} | {min(seconds):.4f} | {max(seconds):.4f} | {medians[name] / base:.3f}"
        rows.append(f"| {name} | {numbers} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    results: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(arguments.repeats):
        for name in VARIANTS:
            print(f"turn {repeat + 1} of {arguments.repeats}: {name}", file=sys.stderr)
            results[name] += turn(name, arguments.store, arguments.steps)[WARM_UP_STEPS:]
    text = table(results)
    mpi = os.environ.get("HPCLLM_MPI", "mpich")
    (HERE / f"step_time_{mpi}.json").write_text(json.dumps(results) + "\n")
    (HERE / f"step_time_{mpi}.md").write_text(f"Made by step_time.py, {os.cpu_count()} cores, {mpi}.\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
