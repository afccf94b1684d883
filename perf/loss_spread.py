"""What each communication policy does to the loss, beside what the seed does.

    python perf/loss_spread.py [STORE] [--steps 1000] [--seeds 6]

    dp=2             the policy's codec on gradients           two replicas, sums over dp
    pp=2             its codecs on activations, both ways      two stages
    dp=2, sharded    codecs on gradients and parameters        two replicas, each with half of the optimizer states;
                                                               lossy codecs of parameters code their differences

The model is `tiny` with 4 sequences of 64 tokens a step, on 2 ranks of this machine; every run ends with the loss on
the store's held-out text. A seed sets weights and order of samples, so a policy's run and the run of `none` with the
same seed differ in the codec alone. A lossless codec gives the bits of raw, as tests/training/test_train.py holds every
policy to, so its runs are those of raw. The verdict on a policy:

    difference   mean over the seeds of (its loss - that of none with the same seed)
    spread       standard deviation over the seeds of the loss of none in the same layout
    inside       |difference| <= spread: the codec moves the loss less than another seed does

A few seeds of a small model can show harm, not prove its absence. Runs that stand in loss_spread.json with the same
settings are not run again, so an interrupted campaign goes on. Policies with the same codecs are one run. STORE: a
token store; without one data/stdlib.h5, prepared if it is not there. Writes loss_spread.json and loss_spread.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
from hpcllm.codecs.names import parse_name  # noqa: E402 - pure: needs no environment
from hpcllm.config.policies import codecs_of  # noqa: E402 - pure: needs no environment

RUN_FILE = ROOT / "jobscripts" / "local" / "tiny.toml"
LAUNCH = ["bash", str(ROOT / "jobscripts" / "local" / "mpirun.sh")]
RECORDS = HERE / "loss_spread.json"
RANKS = 2
POLICIES = ("none", "mzhybrid", "zhybrid", "hpcllm")
DIFFERENCES = {"int8 differences": "int8:2048", "int4 differences": "int4:2048"}  # of parameters, with int8 gradients
DP = {"mesh.pp": 1, "pipeline.microbatches": 1}
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {  # keys, kinds of traffic, policies
    "dp=2": (DP, ("gradients",), POLICIES),
    "pp=2": ({"mesh.pp": 2, "pipeline.microbatches": 4}, ("forward", "backward"), POLICIES),
    "dp=2, sharded": (DP | {"optimizer.shard": "states"}, ("gradients", "parameters"), ("none", *DIFFERENCES)),
}

Record = dict[str, Any]


def codecs(layout: str, policy: str) -> dict[str, str]:
    """Kind of traffic -> codec, of those that the layout has."""
    told = {"gradients": "int8:256", "parameters": DIFFERENCES[policy]} if policy in DIFFERENCES else {}
    chosen = codecs_of("none" if told else policy, told)
    return {kind: chosen[kind] for kind in LAYOUTS[layout][1]}


def lossy(layout: str, policy: str) -> dict[str, str]:
    """The same, with raw for what is lossless."""
    named = codecs(layout, policy).items()
    return {kind: "raw" if parse_name(name).lossless else name for kind, name in named}


def settings(layout: str, policy: str, seed: int, steps: int) -> dict[str, Any]:
    """All that decides the outcome of a run, store and code aside."""
    return {
        **LAYOUTS[layout][0],
        **{f"communication.{kind}": name for kind, name in lossy(layout, policy).items()},
        "run.seed": seed,
        "run.steps": steps,
        "data.sequence_length": 64,
        "data.global_batch": 4,
    }


def distinct(layout: str) -> list[str]:
    """The policies of which no earlier one has the same codecs in this layout."""
    first = {tuple(lossy(layout, policy).items()): policy for policy in reversed(LAYOUTS[layout][2])}
    return [policy for policy in LAYOUTS[layout][2] if policy in first.values()]


def launch(ranks: int, command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*LAUNCH, str(ranks), *command], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")


def train(keys: dict[str, Any], store: str) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            **keys,
            "data.store": store,
            "run.folder": folder,
            "log.every_steps": keys["run.steps"],
            "log.trackers": [],
            "checkpoint.every_steps": 0,
        }
        overrides = [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
        launch(RANKS, ["python", "-m", "hpcllm", "train", str(RUN_FILE), *overrides])
        records = [json.loads(line) for line in (Path(folder) / "tiny" / "log.jsonl").read_text().splitlines()]
    log = {key: value for record in records for key, value in record.items()}
    ratios = {key: log[key] for key in log if key.endswith("_ratio")}
    return {"held_out_loss": log["validation_loss"], "step_s": log["step_s"], **ratios}


def saved() -> list[Record]:
    return json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else []


def find(records: list[Record], keys: dict[str, Any]) -> Record | None:
    return next((record for record in records if record["settings"] == keys), None)


def save(records: list[Record]) -> None:
    beside = RECORDS.with_suffix(".json.tmp")
    beside.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
    beside.replace(RECORDS)


def campaign(store: str, steps: int, seeds: int) -> None:
    """Layout by layout, seed by seed, so that an interrupted campaign has whole sets."""
    wanted = [(s, layout, policy) for layout in LAYOUTS for s in range(seeds) for policy in distinct(layout)]
    for number, (seed, layout, policy) in enumerate(wanted, start=1):
        keys, records = settings(layout, policy, seed, steps), saved()
        if find(records, keys):
            continue
        start = time.monotonic()
        outcome = train(keys, store)
        save([*records, {"layout": layout, "policy": policy, "seed": seed, "settings": keys, **outcome}])
        took_s = time.monotonic() - start
        left_min = took_s * (len(wanted) - number) / 60
        name = f"run {number} of {len(wanted)}: {layout} {policy}, seed {seed}"
        print(f"{name}: {took_s:.0f} s, loss {outcome['held_out_loss']:.4f}; {left_min:.0f} min to go", file=sys.stderr)


def verdict(layout: str, policy: str, steps: int, seeds: int, records: list[Record]) -> list[str]:
    """One row of the table."""
    runs = [find(records, settings(layout, policy, seed, steps)) for seed in range(seeds)]
    exact = [find(records, settings(layout, "none", seed, steps)) for seed in range(seeds)]
    losses = [run["held_out_loss"] for run in runs if run]
    base = [run["held_out_loss"] for run in exact if run]
    difference, spread = mean(loss - other for loss, other in zip(losses, base, strict=True)), stdev(base)
    names = codecs(layout, policy)
    ratios = {round(run[f"{kind}_ratio"], 2) for run in runs if run for kind in names if f"{kind}_ratio" in run}
    exact_bits = set(lossy(layout, policy).values()) == {"raw"}
    says = "lossless" if exact_bits else "inside" if abs(difference) <= spread else "**outside**"
    return [
        layout,
        policy,
        ", ".join(sorted(set(names.values()))),
        "" if exact_bits else " ".join(f"{ratio:.2f}" for ratio in sorted(ratios)),
        f"{mean(losses):.4f}",
        " ".join(f"{loss:.4f}" for loss in losses),
        "" if policy == "none" else f"{difference:+.4f}",
        f"{spread:.4f}",
        "" if policy == "none" else says,
    ]


def table(steps: int, seeds: int) -> str:
    titles = ["layout", "policy", "codec", "ratio", "mean loss", "by seed", "difference", "spread", "verdict"]
    rows = [verdict(layout, policy, steps, seeds, saved()) for layout in LAYOUTS for policy in LAYOUTS[layout][2]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def prepared(store: str | None) -> str:
    path = Path(store) if store else ROOT / "data" / "stdlib.h5"
    if not store and not path.exists():
        path.parent.mkdir(exist_ok=True)
        launch(RANKS, ["python", "-m", "hpcllm", "prepare", "--output", str(path)])
    return str(path.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.seeds < 2 or arguments.steps < 1:
        parser.error("--seeds should be 2 or more, for a spread, and --steps 1 or more")
    campaign(prepared(arguments.store), arguments.steps, arguments.seeds)
    head = (
        f"Made by loss_spread.py: held-out loss (nats a token) of `tiny` after {arguments.steps} steps of 256 tokens. "
        "Difference: mean over the seeds of (loss - loss of none with the same seed). Spread: standard deviation over "
        "the seeds of the loss of none. Inside: |difference| <= spread."
    )
    text = f"{head}\n\n{table(arguments.steps, arguments.seeds)}\n"
    (HERE / "loss_spread.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
