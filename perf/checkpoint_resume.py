"""A run that was cut off ends with the bits of one that was not: every shard level x recomputation x codec x precision.

    mpirun -n 2 python perf/checkpoint_resume.py STORE [--steps 8]

    whole   1 2 3* 4 5 6* 7 8*        * a checkpoint, written behind the training; then those after 3 are deleted
    again        3* 4 5 6* 7 8*       the same losses, samples and tensors, bit for bit

dp = ranks, and where that is even dp = ranks / 2 with pp = 2 too, but for shard = "all". Writes checkpoint_resume.json
and checkpoint_resume.md; what stands there already is not run again. Any difference ends with exit code 1.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcllm.checkpoint.folder import newest_first, step_of
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config import schema as configs
from hpcllm.system.job import StopSignals
from hpcllm.training.loop import train

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "checkpoint_resume.json"
EVERY = 3
SHARDS = ("none", "states", "states+gradients", "all")
RECOMPUTE = ("none", "selective", "full")
CODECS = ("raw", "int8:64", "int4:32+ef", "int4:32:sr+ef")
PARAMETERS = ("raw", "int4:64")
COMPUTE = ("fp32", "bf16", "fp16")
Case = dict[str, Any]


def cases(ranks: int) -> Iterator[Case]:
    meshes = [(ranks, 1), *([(ranks // 2, 2)] if ranks % 2 == 0 else [])]
    for (dp, pp), shard, recompute, codec, parameters, compute in itertools.product(
        meshes, SHARDS, RECOMPUTE, CODECS, PARAMETERS, COMPUTE
    ):
        if (shard == "all" and pp > 1) or (shard == "none" and parameters != "raw"):
            continue
        if dp == 1 and (shard, codec) != ("none", "raw"):  # nobody to share with
            continue
        yield {
            "mesh.dp": dp,
            "mesh.pp": pp,
            "optimizer.shard": shard,
            "pipeline.recompute": recompute,
            "communication.gradients": codec,
            "communication.parameters": parameters,
            "precision.compute": compute,
        }


def is_equal(case: Case, comm: MPI.Intracomm, store: str, steps: int) -> bool:
    """Whether the run's second half repeats; the answer of rank 0, on all ranks. Collective over comm."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    keys = {
        **case,
        "run.folder": folder,
        "run.steps": steps,
        "model.layers": 2,
        "model.hidden": 32,
        "model.ffn": 48,
        "pipeline.microbatches": 2,
        "data.store": store,
        "data.sequence_length": 16,
        "data.global_batch": 24,
        "data.validation_sequences": 1,
        "optimizer.warmup_steps": 3,
        "communication.exact_steps": 1,
        "communication.bucket_mib": 0.05,
        "checkpoint.every_steps": EVERY,
        "checkpoint.keep": 99,
        "log.every_steps": 1,
        "log.trackers": [],
    }
    config = configs.parse("", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    outcomes = []
    for _ in range(2):
        with StopSignals() as signals, open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(config, comm, signals)
        comm.Barrier()
        if comm.rank == 0:
            outcomes.append(_outcome(Path(folder) / "run"))
        comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)
    return bool(comm.bcast(comm.rank == 0 and outcomes[0] == outcomes[1]))


def _outcome(run: Path) -> list[Any]:
    """All that was logged of steps and all tensors; then everything after the first checkpoint is taken away."""
    lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[Any] = [[r["step"], r["loss"], r["samples"]] for r in map(json.loads, lines) if "loss" in r]
    for path in newest_first(run / "checkpoints"):
        with Checkpoint.open(path) as checkpoint:
            found.append({name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets})
        if step_of(path) != EVERY:
            path.unlink()
    return found


def write_down(records: list[Case]) -> None:
    RECORDS.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
    lines = [
        "# A run that was cut off, and one that was not",
        "",
        "`mpirun -n R python perf/checkpoint_resume.py STORE`: losses, samples and tensors of the steps after a",
        "checkpoint, made once without a stop and once by a new start from that checkpoint. Every combination of shard",
        f"level ({', '.join(SHARDS)}), recomputation ({', '.join(RECOMPUTE)}), codec of gradients",
        f"({', '.join(CODECS)}) and of parameters ({', '.join(PARAMETERS)}), precision ({', '.join(COMPUTE)});",
        "dp = R, and dp = R / 2 with pp = 2.",
        "",
        "| ranks | combinations | the same, bit for bit |",
        "|---|---|---|",
    ]
    for ranks in sorted({record["ranks"] for record in records}):
        of = [record for record in records if record["ranks"] == ranks]
        lines.append(f"| {ranks} | {len(of)} | {sum(record['equal'] for record in of)} |")
    RECORDS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a token store, written by `hpcllm prepare`")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if world.rank == 0 and RECORDS.exists() else []
    records = world.bcast(records)
    done = [record["case"] for record in records if record["ranks"] == world.size]
    for case in (case for case in cases(world.size) if case not in done):
        equal = is_equal(case, world, arguments.store, arguments.steps)
        records.append({"ranks": world.size, "case": case, "equal": equal})
        if world.rank == 0:
            write_down(records)
            print("the same" if equal else "OTHERWISE", case, file=sys.stderr, flush=True)
    return 0 if all(record["equal"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
