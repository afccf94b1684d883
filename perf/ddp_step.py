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
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from peer_runs import CLUSTER, OF_30M, Ranks, common_keys, our_run, peer_run, prepared, ratio_text

from hpcllm.system.text import counted

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 5
SIZES: dict[str, tuple[int, dict[str, Any]]] = {  # tokens a rank and step, what the model has other than the run file
    "tiny": (8, {}),
    "30m": (64, OF_30M),
}
ALONE, KEPT = "one rank alone", ", memory kept"
PEERS = {ALONE: "", "DDP, fp32": "fp32", "DDP, fp16 hook": "fp16"}  # the hook of the plain loop
OURS = {
    "ours, policy none": {"communication.policy": "none"},
    "ours, policy hpcllm": {"communication.policy": "hpcllm"},
    "ours, hpcllm, embedding too": {"communication.policy": "hpcllm", "communication.exact": "norm,bias"},
}


def steps_of(model: str, variant: str, hosts: int, store: str, steps: int) -> list[dict[str, Any]]:
    """A record a step, of one sequence a rank."""
    name = variant.removesuffix(KEPT)
    ranks = Ranks(1 if name == ALONE else hosts, on_cluster=True)
    tokens, shape = SIZES[model]
    keys = common_keys(shape, store, tokens, ranks.count)
    if variant in OURS:
        return our_run(ranks, {**keys, **OURS[variant]}, steps)
    return peer_run(ranks, PEERS[name], keys, steps, keeps_memory=name != variant)


def a_turn(model: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a variant once. Returns the seconds of its steps behind the warm-up, and what a rank sends in one."""
    count = arguments.steps + WARM_UP_STEPS
    steps = steps_of(model, variant, arguments.hosts, arguments.store, count)[WARM_UP_STEPS:]
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
        parts += [
            f"### {model}, {SIZES[model][0]} tokens a rank and step, {counted(count, 'turn')} of {steps} steps",
            table(mine),
        ]
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
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if not set(models) <= set(SIZES) or arguments.hosts < 2 or min(arguments.repeats, arguments.steps) < 1:
        parser.error(f"--models takes {', '.join(SIZES)}; --hosts 2 or more; --repeats and --steps 1 or more")
    path = HERE / "ddp_step.json"
    turns = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    subprocess.run([*CLUSTER, "up", str(arguments.hosts), arguments.rate], check=True)
    try:
        arguments.store = prepared(arguments.store, Ranks(1, on_cluster=True))
        for _ in range(arguments.repeats):
            for model in models:
                measure(model, arguments, turns)
    finally:
        subprocess.run([*CLUSTER, "down"], check=True)
    write(turns)


if __name__ == "__main__":
    main()
