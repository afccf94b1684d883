"""One 30M model on two ranks of one machine: plain PyTorch, DDP over gloo, and ours in each layout.

    python perf/layouts.py STORE [--repeats 3] [--steps 8] [--tokens 256] [--batch 8]

The variants take turns, `repeats` times over, each time in fresh processes with one thread a rank (but for the line
that says two). Tokens/s are from the median of all steps but the first two of each turn. Memory is what a process had
resident at most, less what it had once everything was imported: the larger of the two ranks, the median over the
turns. Memory that two ranks share counts in both. Tensors are what our run says of itself: measured in its first step,
and predicted, as `python -m hpcllm memory` does. Writes layouts.json and layouts.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_FILE = ROOT / "jobscripts" / "local" / "tiny.toml"
LAUNCH = ROOT / "jobscripts" / "local" / "mpirun.sh"
WARM_UP_STEPS = 2
MODEL = {"model.layers": 8, "model.hidden": 512, "model.heads": 8, "model.ffn": 1408}
PEER = "PyTorch DDP (gloo)"
VARIANTS: dict[str, tuple[int, int, str | dict[str, Any]]] = {  # ranks, threads a rank, the peer's hook or our keys
    "plain PyTorch, 1 rank": (1, 1, ""),
    "plain PyTorch, 1 rank, 2 threads": (1, 2, ""),
    PEER: (2, 1, "fp32"),
    "ours, 1 rank": (1, 1, {}),
    "ours, dp=2": (2, 1, {}),
    "ours, dp=2, states sharded": (2, 1, {"optimizer.shard": "states"}),
    "ours, dp=2, states and gradients sharded": (2, 1, {"optimizer.shard": "states+gradients"}),
    "ours, dp=2, all sharded": (2, 1, {"optimizer.shard": "all"}),
    "ours, tp=2": (2, 1, {"mesh.tp": 2}),
    "ours, tp=2, sequence parallel": (2, 1, {"mesh.tp": 2, "mesh.sequence_parallel": True}),
    "ours, pp=2, 4 microbatches": (2, 1, {"mesh.pp": 2, "pipeline.microbatches": 4}),
    "ours, dp=2, full recomputation": (2, 1, {"pipeline.recompute": "full"}),
}


def resident_bytes(key: str) -> int:
    """VmRSS: now; VmHWM: at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def rank_program(peer: str | None, settings: list[str], steps: int) -> None:
    """What each rank runs; rank 0 prints a line of JSON: seconds of its steps, and the memory of all ranks."""
    import plain_torch
    import torch
    from mpi4py import MPI

    from hpcllm.config import schema as configs
    from hpcllm.system.job import StopSignals
    from hpcllm.training.loop import train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # the first one imports much
    before, tensors = resident_bytes("VmRSS"), {}
    if peer is not None:
        run = plain_torch.plain_loop(RUN_FILE, settings, steps, peer)
        seconds, loss = run.seconds, run.losses[-1]
    else:
        config = configs.load(RUN_FILE, settings)
        with StopSignals() as signals:
            loss = train(config, MPI.COMM_WORLD, signals).loss
        log = Path(config.run.folder) / config.run.name / "log.jsonl"
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        seconds = [record["step_s"] for record in records if "step_s" in record]
        tensors = next(record for record in records if "parameters_memory_bytes" in record)
    memory = MPI.COMM_WORLD.gather(resident_bytes("VmHWM") - before)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"seconds": seconds, "memory_bytes": memory, "loss": loss} | _tensors(tensors)), flush=True)
    plain_torch.leave()


def _tensors(record: dict[str, int]) -> dict[str, int]:
    """Bytes of all kinds of tensors together, the most of any rank; nothing of the peers."""
    told = {key: size for key, size in record.items() if key.endswith("_predicted_bytes")}
    found = {key: size for key, size in record.items() if key.endswith("_bytes") and key not in told}
    return {"tensor_bytes": sum(found.values()), "tensor_predicted_bytes": sum(told.values())} if record else {}


def turn(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    ranks, threads, kind = VARIANTS[name]
    keys = {"mesh.pp": 1, "pipeline.microbatches": 1, "communication.hash_every_steps": 0}
    keys |= {"data.store": str(Path(arguments.store).resolve()), "data.validation_sequences": 1}
    keys |= {"data.sequence_length": arguments.tokens, "data.global_batch": arguments.batch}
    keys |= {"log.every_steps": 1, "log.trackers": [], "checkpoint.every_steps": 0}
    steps = arguments.steps + WARM_UP_STEPS
    command = ["python", __file__, arguments.store, "--rank", "--steps", str(steps)]
    if isinstance(kind, str):
        command += [f"--peer={kind}"]
    else:
        keys |= kind
    with tempfile.TemporaryDirectory() as folder:
        keys |= {"run.folder": folder, "run.steps": steps}
        command += [f"--set={key}={json.dumps(value)}" for key, value in (MODEL | keys).items()]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            ["bash", str(LAUNCH), str(ranks), *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=900
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout}")
    return json.loads(lines[-1])


def summary(name: str, turns: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    seconds = [s for one in turns for s in one["seconds"][WARM_UP_STEPS:]]
    return {
        "variant": name,
        "median_s": median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "tokens_per_s": tokens / median(seconds),
        "memory_bytes": median(max(one["memory_bytes"]) for one in turns),
        **{key: turns[-1][key] for key in ("loss", "tensor_bytes", "tensor_predicted_bytes") if key in turns[-1]},
    }


def table(records: list[dict[str, Any]]) -> str:
    base = next(r["tokens_per_s"] for r in records if r["variant"] == PEER)
    titles = ["variant", "median step, s", "fastest", "slowest", "tokens/s", "to DDP"]
    titles += ["memory a rank, MB", "its tensors, MB", "predicted"]
    rows = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * 8}"]
    for r in records:
        times = " | ".join(f"{r[key]:.3f}" for key in ("median_s", "min_s", "max_s"))
        speed = f"{r['tokens_per_s']:.0f} | {r['tokens_per_s'] / base:.2f}"
        tensors = [f"{r[key] / 1e6:.1f}" if key in r else "" for key in ("tensor_bytes", "tensor_predicted_bytes")]
        rows.append(f"| {r['variant']} | {times} | {speed} | {r['memory_bytes'] / 1e6:.0f} | {' | '.join(tensors)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_program(arguments.peer, arguments.set, arguments.steps)
        return
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for repeat in range(arguments.repeats):
        for name, kept in turns.items():
            print(f"turn {repeat + 1} of {arguments.repeats}: {name}", file=sys.stderr, flush=True)
            kept.append(turn(name, arguments))
    records = [summary(name, kept, arguments.tokens * arguments.batch) for name, kept in turns.items()]
    head = (
        f"Made by layouts.py: {os.environ.get('HPCLLM_MPI', 'mpich')}, {os.cpu_count()} cores, steps of "
        f"{arguments.batch} x {arguments.tokens} tokens, {arguments.repeats} turns of {arguments.steps} steps."
    )
    (HERE / "layouts.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (HERE / "layouts.md").write_text(f"{head}\n\n{table(records)}\n", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
