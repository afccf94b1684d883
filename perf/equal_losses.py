"""Every layout trains the same model: `tiny` in fp32, losses of 20 steps beside those of one process.

    mpirun -n 8 python perf/equal_losses.py STORE [--steps 20]

For each number of ranks up to the job's: every (dp, pp, tp) with that product which divides the model, with every
level of sharding, every level of recomputation, and with tp > 1 with and without sequence parallelism. A step has 24
sequences, or where dp = 5 or 7 does not divide them 20 or 28. A figure is the largest relative difference of a loss
over the steps. Writes equal_losses.json and equal_losses.md; what stands there already is not run again. A difference
above 1e-5 ends with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.config import schema as configs
from hpcllm.errors import HpcllmError
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "equal_losses.json"
BATCHES, LENGTH = (24, 20, 28), 32
SHARDS = ("none", "states", "states+gradients", "all")
RECOMPUTE = ("none", "selective", "full")
LIMIT = 1e-5
Case = dict[str, Any]


def cases(ranks: int) -> Iterator[Case]:
    """Every layout of that many ranks, as keys of a run file."""
    for dp, pp, tp in itertools.product(range(1, ranks + 1), repeat=3):
        if dp * pp * tp != ranks or pp > 4 or 4 % tp:  # tiny: 4 layers, 4 heads
            continue
        batch = next(batch for batch in BATCHES if batch % dp == 0)
        shards = [s for s in SHARDS if dp > 1 or s == "none" if pp == 1 or s != "all"]
        for shard, recompute, split in itertools.product(shards, RECOMPUTE, (False, True) if tp > 1 else (False,)):
            yield {
                "mesh.dp": dp,
                "mesh.pp": pp,
                "mesh.tp": tp,
                "mesh.sequence_parallel": split,
                "optimizer.shard": shard,
                "pipeline.recompute": recompute,
                "pipeline.microbatches": batch // dp // (2 if batch // dp % 2 == 0 else 1),
                "data.global_batch": batch,
            }


def losses(case: Case, comm: MPI.Intracomm, store: str, steps: int) -> list[float]:
    """The loss of each step. Collective over comm."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    keys = {
        **case,
        "run.folder": folder,
        "run.steps": steps,
        "model.preset": "tiny",
        "data.store": store,
        "data.sequence_length": LENGTH,
        "data.validation_sequences": 1,
        "optimizer.warmup_steps": 5,
        "log.every_steps": 1,
        "log.trackers": [],
        "checkpoint.every_steps": 0,
    }
    config = configs.parse("", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    with StopSignals() as signals, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(config, comm, signals)
    comm.Barrier()
    if comm.rank:
        return []
    lines = (Path(folder) / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.rmtree(folder)
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def run(world: MPI.Intracomm, store: str, steps: int) -> list[Case]:
    """Rank 0 gets all records, those of earlier calls too. Collective over world."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if world.rank == 0 and RECORDS.exists() else []
    done = world.bcast([record["case"] for record in records])
    alone = _alone(world, store, steps)
    for ranks in range(1, world.size + 1):
        comm = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if comm != MPI.COMM_NULL:
            for case in (case for case in cases(ranks) if case not in done):
                start = time.monotonic()
                try:
                    found = losses(case, comm, store, steps)
                except HpcllmError as error:
                    sys.exit(f"{case}: {error}")
                if world.rank == 0:
                    pairs = zip(found, alone[case["data.global_batch"]], strict=True)
                    worst = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
                    records.append({"case": case, "ranks": ranks, "difference": worst, "last_loss": found[-1]})
                    RECORDS.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
                    print(f"{worst:.1e}  {time.monotonic() - start:5.1f} s  {case}", file=sys.stderr, flush=True)
            comm.Free()
        world.Barrier()
    return records


def _alone(world: MPI.Intracomm, store: str, steps: int) -> dict[int, list[float]]:
    """The losses of one process, by batch; on rank 0. Collective over world."""
    found: dict[int, list[float]] = {}
    if world.rank == 0:
        plain = next(cases(1))
        for n in BATCHES:
            case = plain | {"data.global_batch": n, "pipeline.microbatches": n // 2}
            found[n] = losses(case, MPI.COMM_SELF, store, steps)
    world.Barrier()
    return found


def table(records: list[Case]) -> str:
    """One row a (dp, pp, tp): how many runs, and the largest difference by shard level."""
    rows = [f"| dp x pp x tp | runs | {' | '.join(SHARDS)} |", f"|---|---:|{'---:|' * len(SHARDS)}"]
    by_mesh: dict[tuple[int, ...], list[Case]] = {}
    for record in records:
        by_mesh.setdefault(tuple(record["case"][f"mesh.{axis}"] for axis in ("dp", "pp", "tp")), []).append(record)
    for mesh, found in by_mesh.items():
        cells = []
        for shard in SHARDS:
            worst = [record["difference"] for record in found if record["case"]["optimizer.shard"] == shard]
            cells.append(f"{max(worst):.1e}" if worst else "")
        rows.append(f"| {' x '.join(map(str, mesh))} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _extent(records: list[Case]) -> str:
    """How many of the layouts were run, by number of ranks."""
    ranks = sorted({record["ranks"] for record in records})
    counts = [f"{sum(r['ranks'] == n for r in records)} of {len(list(cases(n)))} at {n}" for n in ranks]
    text = f"Layouts that were run, by number of ranks: {', '.join(counts)}"
    if len(records) == sum(len(list(cases(n))) for n in ranks):
        return f"{text}."
    # ranks that share a core take turns, in every message of every step
    return f"{text}; the others are left out, for so many ranks wait for one another on the two cores of this machine."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    records = run(world, str(Path(arguments.store).resolve()), arguments.steps)
    if world.rank == 0:
        worst = max(record["difference"] for record in records)
        head = (
            f"Made by equal_losses.py: `tiny`, fp32, {arguments.steps} steps of 20 to 28 sequences of {LENGTH} tokens. "
            "Largest relative difference of a step's loss from one process without sharding or recomputation, each "
            "cell over all levels of recomputation, with and without sequence parallelism."
        )
        foot = f"{len(records)} runs, the largest difference {worst:.1e}."
        body = f"{head} {_extent(records)}\n\n{table(records)}\n\n{foot}\n"
        (HERE / "equal_losses.md").write_text(body, encoding="utf-8")
        print(body)
        if worst > LIMIT:
            sys.exit(1)


if __name__ == "__main__":
    main()
