"""Training over slow links: ours beside PyTorch DDP over gloo. Same model, weights, data, batch, AdamW and clipping.

    python perf/ddp_step.py [STORE] [--hosts 2] [--rate 1gbit] [--models tiny,30m] [--repeats 3] [--steps 20]

                                                 what travels in a step
    one rank alone                               nothing: what computing costs
    DDP, fp32 / DDP, fp16 hook                   PyTorch's DistributedDataParallel, as it is / with fp16_compress_hook
    ours, policy none / hpcllm                   python -m hpcllm train
    ours, hpcllm, embedding too                  with communication.exact = "norm,bias": the embedding as int8, too

The variants take turns on the cluster of cluster.sh (so this needs root), `repeats` times over, each time in fresh
processes, one rank a host and one thread a rank. A variant's figure is the median of all its steps but the first of
each turn, rank 0's; every step ends with an exchange, so ranks keep pace. Its share of communication is what its step
takes longer than that of one rank alone. Batches are so small that this is about 80 % without compression: what
compression can bring at most, not what it brings in an ordinary run. STORE: a token store; without one data/stdlib.h5,
prepared if it is not there. Writes ddp_step.json and ddp_step.md beside this file.
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
CLUSTER = ["bash", str(HERE / "cluster.sh")]
WARM_UP_STEPS = 5
SIZES = {  # name -> (tokens a rank and step, what the model has other than the run file)
    "tiny": (8, {}),
    "30m": (64, {"model.layers": 8, "model.hidden": 512, "model.heads": 8, "model.ffn": 1408}),
}
ALONE, BASELINE = "one rank alone", "ours, policy none"
DDP = {ALONE: "", "DDP, fp32": "fp32", "DDP, fp16 hook": "fp16"}
OURS = {
    BASELINE: {"communication.policy": "none"},
    "ours, policy hpcllm": {"communication.policy": "hpcllm"},
    "ours, hpcllm, embedding too": {"communication.policy": "hpcllm", "communication.exact": "norm,bias"},
}


def overrides(model: str, ranks: int, store: str) -> list[str]:
    """What all variants of a model have in common, as --set takes it: one sequence a rank, no pipeline."""
    tokens, shape = SIZES[model]
    keys = {
        **shape,
        "data.store": store,
        "data.sequence_length": tokens,
        "data.global_batch": ranks,
        "mesh.pp": 1,
        "pipeline.microbatches": 1,
    }
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def rank_program(hook: str, settings: list[str], steps: int) -> None:
    """What each rank of a PyTorch variant runs; rank 0 prints the seconds of its steps as a line of JSON."""
    import plain_torch

    run = plain_torch.plain_loop(RUN_FILE, settings, steps, hook)
    if plain_torch.MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"seconds": run.seconds, "loss": run.loss}), flush=True)
    plain_torch.leave()


def run_on_cluster(ranks: int, command: list[str]) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # not that the hosts have no name server
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*CLUSTER, "run", "-n", str(ranks), *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=900
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def pytorch_turn(variant: str, settings: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    """A record a step. On one rank the batch is that of one rank, too."""
    if variant == ALONE:
        settings, ranks = [*settings, "data.global_batch=1"], 1
    program = ["python", __file__, "--rank", "--hook", DDP[variant], "--steps", str(steps)]
    output = run_on_cluster(ranks, [*program, *(f"--set={setting}" for setting in settings)])
    lines = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    return [{"step_s": seconds} for seconds in json.loads(lines[-1])["seconds"]]


def our_turn(variant: str, settings: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    """The step records of the run's own log."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            **OURS[variant],
            "communication.exact_steps": 0,
            "run.folder": folder,
            "run.steps": steps,
            "data.validation_sequences": ranks,
            "log.every_steps": 1,
            "log.trackers": [],
            "checkpoint.every_steps": 0,
        }
        settings = [*settings, *(f"{key}={json.dumps(value)}" for key, value in keys.items())]
        command = ["python", "-m", "hpcllm", "train", str(RUN_FILE), *(f"--set={setting}" for setting in settings)]
        run_on_cluster(ranks, command)
        lines = (Path(folder) / "tiny" / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "step_s" in record]


def summary(model: str, variant: str, ranks: int, steps: list[dict[str, Any]], alone_s: float) -> dict[str, Any]:
    seconds = [step["step_s"] for step in steps]
    working = 1 if variant == ALONE else ranks
    record = {
        "model": model,
        "variant": variant,
        "ranks": working,
        "tokens_a_rank": SIZES[model][0],
        "steps": len(seconds),
        "median_s": median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "tokens_per_s": working * SIZES[model][0] / median(seconds),
        "communication_share": max(0.0, 1 - alone_s / median(seconds)),
    }
    for key in ("gradients_plain_bytes", "gradients_bytes", "communication_exposed_s", "communication_hidden_s"):
        if key in steps[0]:
            record[key] = median(step[key] for step in steps)
    return record


def summaries(model: str, ranks: int, results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    alone_s = median(step["step_s"] for step in results[ALONE])
    return [summary(model, variant, ranks, steps, alone_s) for variant, steps in results.items()]


def table(records: list[dict[str, Any]]) -> str:
    titles = ["variant", "median step, s", "fastest", "slowest", "tokens/s", "communication", "MB sent a step"]
    rows = [f"| {' | '.join([*titles, f'to {BASELINE}', 'to DDP, fp32'])} |", f"|---|{'---:|' * 8}"]
    tokens_per_s = {record["variant"]: record["tokens_per_s"] for record in records}
    for r in records:
        sent = f"{r['gradients_bytes'] / 1e6:.2f}" if "gradients_bytes" in r else ""
        speed_ups = [f"{r['tokens_per_s'] / tokens_per_s[base]:.2f}" for base in (BASELINE, "DDP, fp32")]
        times = [f"{r[key]:.4f}" for key in ("median_s", "min_s", "max_s")]
        share = f"{100 * r['communication_share']:.0f} %"
        cells = [r["variant"], *times, f"{r['tokens_per_s']:.0f}", share, sent, *speed_ups]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def measure(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    settings = overrides(model, arguments.hosts, str(Path(arguments.store).resolve()))
    steps = arguments.steps + WARM_UP_STEPS
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in (*DDP, *OURS)}
    for repeat in range(arguments.repeats):
        for variant, kept in results.items():
            print(f"{model}: turn {repeat + 1} of {arguments.repeats}: {variant}", file=sys.stderr, flush=True)
            turn = pytorch_turn if variant in DDP else our_turn
            kept += turn(variant, settings, arguments.hosts, steps)[WARM_UP_STEPS:]
    return summaries(model, arguments.hosts, results)


def prepared(store: str | None) -> str:
    path = ROOT / "data" / "stdlib.h5"
    if store or path.exists():
        return store or str(path)
    path.parent.mkdir(exist_ok=True)
    run_on_cluster(1, ["python", "-m", "hpcllm", "prepare", "--output", str(path)])
    return str(path)


def write(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    head = f"Made by ddp_step.py: {arguments.hosts} hosts of one rank and one thread, links of {arguments.rate}, "
    head += f"{os.cpu_count()} cores. Medians of {arguments.repeats} turns of {arguments.steps} steps."
    parts = [head]
    for model in dict.fromkeys(record["model"] for record in records):
        mine = [record for record in records if record["model"] == model]
        parts += [f"### {model}, {SIZES[model][0]} tokens a rank and step", table(mine)]
    text = "\n\n".join(parts) + "\n"
    (HERE / "ddp_step.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (HERE / "ddp_step.md").write_text(text, encoding="utf-8")
    print(text, end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    for hidden in ("--hook", "--set"):
        parser.add_argument(hidden, action="append" if hidden == "--set" else "store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_program(arguments.hook, arguments.set, arguments.steps)
        return
    models = arguments.models.split(",")
    if not set(models) <= set(SIZES) or arguments.hosts < 2 or min(arguments.repeats, arguments.steps) < 1:
        parser.error(f"--models takes {', '.join(SIZES)}; --hosts 2 or more; --repeats and --steps 1 or more")
    subprocess.run([*CLUSTER, "up", str(arguments.hosts), arguments.rate], check=True)
    try:
        arguments.store = prepared(arguments.store)
        records = [record for model in models for record in measure(model, arguments)]
    finally:
        subprocess.run([*CLUSTER, "down"], check=True)
    write(arguments, records)


if __name__ == "__main__":
    main()
