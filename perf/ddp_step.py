"""Training over slow links: ours beside PyTorch DDP over gloo. Same model, weights, data, batch, AdamW and clipping.

    python perf/ddp_step.py [STORE] [--hosts 2] [--rate 1gbit] [--models tiny,30m] [--repeats 3] [--steps 20]

                                                 what travels in a step
    one rank alone                               nothing: what computing costs
    DDP, fp32 / DDP, fp16 hook                   PyTorch's DistributedDataParallel, as it is / with fp16_compress_hook
    ours, policy none / hpcllm                   python -m hpcllm train
    ours, hpcllm, embedding too                  with communication.exact = "norm,bias": the embedding as int8, too

The peers run twice: as found, and with glibc told to keep memory between calls, as our ranks tell it by themselves.

The variants take turns on the cluster of cluster.sh (so this needs root), `repeats` times over, each time in fresh
processes, one rank a host and one thread a rank. A variant's figure is the median of all its steps but the first of
each turn, rank 0's; every step ends with an exchange, so ranks keep pace. A ratio is the median of those of each turn,
with the least and the most of them. The wire's time is that of a rank's gradients at the links' rate, without headers.
Batches are so small that DDP spends about 70 % of a step in communication: what compression can bring at most, not what
it brings in an ordinary run. STORE: a token store; without one data/stdlib.h5, prepared if it is not there.

Adds its turns to those in ddp_step.json beside this file, which is to be removed where the code has changed, and writes
ddp_step.md from all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
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
ALONE, KEPT = "one rank alone", ", memory kept"
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30)}
PEERS = {ALONE: "", "DDP, fp32": "fp32", "DDP, fp16 hook": "fp16"}  # the hook of the plain loop
OURS = {
    "ours, policy none": {"communication.policy": "none"},
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
        "data.document_mask": False,  # the peers have none
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


def run_on_cluster(ranks: int, command: list[str], variables: dict[str, str] | None = None) -> str:
    environment = {
        **os.environ,
        **(variables or {}),
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


def peer_turn(variant: str, settings: list[str], ranks: int, steps: int) -> list[dict[str, Any]]:
    """A record a step. On one rank the batch is that of one rank, too."""
    name = variant.removesuffix(KEPT)
    if name == ALONE:
        settings, ranks = [*settings, "data.global_batch=1"], 1
    program = ["python", __file__, "--rank", "--hook", PEERS[name], "--steps", str(steps)]
    command = [*program, *(f"--set={setting}" for setting in settings)]
    output = run_on_cluster(ranks, command, None if name == variant else KEEP_MEMORY)
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


def a_turn(model: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a variant once. Returns the seconds of its steps behind the warm-up, and what a rank sends in one."""
    settings = overrides(model, arguments.hosts, str(Path(arguments.store).resolve()))
    run = our_turn if variant in OURS else peer_turn
    steps = run(variant, settings, arguments.hosts, arguments.steps + WARM_UP_STEPS)[WARM_UP_STEPS:]
    sent = {"sent_bytes": steps[-1]["gradients_bytes"] / arguments.hosts} if variant in OURS else {}
    found = {"model": model, "variant": variant, "hosts": arguments.hosts, "rate": arguments.rate}
    return {**found, "cores": os.cpu_count(), "seconds": [step["step_s"] for step in steps], **sent}


def measure(model: str, arguments: argparse.Namespace, turns: list[dict[str, Any]]) -> None:
    """Add a turn of each variant to `turns` and to the file; a turn that was cut off goes on where it ended."""
    variants = [*(name + kept for name in PEERS for kept in ("", KEPT)), *OURS]
    done = Counter(turn["variant"] for turn in turns if turn["model"] == model)
    for variant in [variant for variant in variants if done[variant] == min(done[each] for each in variants)]:
        print(f"{model}: {variant}", file=sys.stderr, flush=True)
        turns.append(a_turn(model, variant, arguments))
        (HERE / "ddp_step.json").write_text(json.dumps(turns) + "\n", encoding="utf-8")


def bits_a_second(rate: str) -> float:
    number, unit = rate.removesuffix("bit")[:-1], rate.removesuffix("bit")[-1]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


def ratio_text(times: list[float], others: list[float]) -> str:
    """How many times as long the others' steps take, by turns; bold where that is less."""
    ratios = [other / time for time, other in zip(times, others, strict=True)]
    mark = "**" if median(ratios) < 1 else ""
    return f"{mark}{median(ratios):.2f}{mark} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(turns: list[dict[str, Any]]) -> str:
    """One model's variants."""
    variants = dict.fromkeys(turn["variant"] for turn in turns)
    kept = {variant: [turn for turn in turns if turn["variant"] == variant] for variant in variants}
    medians = {variant: [median(turn["seconds"]) for turn in mine] for variant, mine in kept.items()}
    alone_s = min(median(medians[name]) for name in (ALONE, ALONE + KEPT))
    peers = {name: medians[name] for name in medians if name not in OURS and not name.startswith(ALONE)}
    titles = ["variant", "median step, s", "fastest", "slowest", "MB a rank sends", "wire, s"]
    titles += ["step to one rank alone", "step to wire", *(f"{peer} / step" for peer in peers)]
    rows = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * (len(titles) - 1)}"]
    for variant, mine in kept.items():
        seconds = [s for turn in mine for s in turn["seconds"]]
        times = [f"{value:.4f}" for value in (median(seconds), min(seconds), max(seconds))]
        beside = [ratio_text(medians[variant], others) if variant in OURS else "" for others in peers.values()]
        sent, wire, to_wire = wire_cells(mine[0], median(seconds))
        cells = [variant, *times, sent, wire, f"{median(seconds) / alone_s:.2f}", to_wire, *beside]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def wire_cells(turn: dict[str, Any], step_s: float) -> tuple[str, str, str]:
    """MB that a rank sends in a step, the seconds that takes, and how many times as long the step is."""
    if "sent_bytes" not in turn:
        return "", "", ""
    wire_s = 8 * turn["sent_bytes"] / bits_a_second(turn["rate"])
    return f"{turn['sent_bytes'] / 1e6:.2f}", f"{wire_s:.4f}", f"{step_s / wire_s:.2f}"


def prepared(store: str | None) -> str:
    path = ROOT / "data" / "stdlib.h5"
    if store or path.exists():
        return store or str(path)
    path.parent.mkdir(exist_ok=True)
    run_on_cluster(1, ["python", "-m", "hpcllm", "prepare", "--output", str(path)])
    return str(path)


def write(turns: list[dict[str, Any]]) -> None:
    first = turns[0]
    parts = [
        f"Made by ddp_step.py: {first['hosts']} hosts of one rank and one thread, links of {first['rate']}, "
        f"{first['cores']} cores. Medians of all steps; ratios are medians of those of each turn, with the least and "
        "the most. Bold: slower than the peer."
    ]
    for model in dict.fromkeys(turn["model"] for turn in turns):
        mine = [turn for turn in turns if turn["model"] == model]
        count = sum(turn["variant"] == ALONE for turn in mine)
        steps = len(mine[0]["seconds"])
        parts += [f"### {model}, {SIZES[model][0]} tokens a rank and step, {count} turns of {steps} steps", table(mine)]
    text = "\n\n".join(parts) + "\n"
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
    path = HERE / "ddp_step.json"
    turns = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    subprocess.run([*CLUSTER, "up", str(arguments.hosts), arguments.rate], check=True)
    try:
        arguments.store = prepared(arguments.store)
        for _ in range(arguments.repeats):
            for model in models:
                measure(model, arguments, turns)
    finally:
        subprocess.run([*CLUSTER, "down"], check=True)
    write(turns)


if __name__ == "__main__":
    main()
