"""What learning from rewards reaches on made problems, from a small base that is trained here on their lines.

    python perf/rewards.py FOLDER sort addition      in as many calls as it takes: each goes on where the last ended
    python perf/rewards.py FOLDER --table            the table of what the logs in FOLDER have

    problems --> store --> base: some steps of `train` on their lines --> GRPO from one of its checkpoints --> table

One core; minutes are those of the loop in all calls, as the log counts them, with writing, rewarding and validating.
Held out: the likeliest text of 200 problems that nothing was trained on, rewarded for the exact answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcllm.system.output import say, write_whole

BASE = """
[run]
steps = {base_steps}
[model]
layers = 3
hidden = 96
heads = 4
ffn = 192
max_sequence = 64
[data]
sequence_length = 64
global_batch = 32
[optimizer]
learning_rate = 3e-3
warmup_steps = 10
[checkpoint]
every_steps = {base_at}
keep = 9
[log]
trackers = []
"""
GRPO = """
[run]
steps = {steps}
[data]
sequence_length = 25
global_batch = 512
validation_sequences = 200
[finetuning]
kind = "grpo"
[finetuning.reward]
samples = 8
tokens = 7
[optimizer]
learning_rate = 5e-4
warmup_steps = 5
beta2 = 0.99
weight_decay = 0.0
[checkpoint]
every_steps = 10
[log]
every_steps = 5
validation_every_steps = 50
trackers = []
"""


@dataclass(frozen=True)
class Family:
    """Problems of a size; steps of the base's schedule, the one of its checkpoints to go on from, steps of GRPO."""

    size: int
    base_steps: int
    base_at: int
    steps: int


FAMILIES = {"sort": Family(4, 600, 260, 2000), "addition": Family(2, 1200, 450, 2000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--steps", type=int, metavar="N", help="of GRPO, in a new FOLDER (default: 2000)")
    parser.add_argument("--table", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.families if not arguments.table else ():
        family = FAMILIES[name]
        learn(arguments.folder, name, replace(family, steps=arguments.steps or family.steps))
    say(table(arguments.folder), wide=True)


def learn(folder: Path, name: str, family: Family) -> None:
    """Go on with what is not done yet of a family."""
    store, named = f"{name}.h5", f"{name}:{family.size}"
    base = base_of(name)
    write_whole(folder / "base.toml", BASE.format(base_steps=family.base_steps, base_at=family.base_at))
    write_whole(folder / "grpo.toml", GRPO.format(steps=family.steps))
    if not (folder / store).exists():
        hpcllm(folder, "problems", named, "--count", "6000", "--output", f"{name}.txt")
        hpcllm(folder, "prepare", f"{name}.txt", "--output", store, "--vocabulary", "290")
    task, measured = f"generate={named}", f"base-{name}.json"
    if not (folder / base).exists():
        hpcllm(folder, "train", "base.toml", *settings(f"data.store={store}", f"run.name=base-{name}"))
    if not (folder / measured).exists():
        hpcllm(folder, "evaluate", str(base), "--task", task, "--json", measured)
    hpcllm(folder, "finetune", "grpo.toml", *from_base(name, f"grpo-{name}"))


def base_of(name: str) -> Path:
    """Name the checkpoint that GRPO of a family begins with, in its folder."""
    return Path("runs") / f"base-{name}" / "checkpoints" / f"step_{FAMILIES[name].base_at:08d}.h5"


def from_base(name: str, run: str, *more: str) -> list[str]:
    """Return the words that make a run of this name of a family's problems, from its base."""
    named = f'finetuning.reward.prompts="{name}:{FAMILIES[name].size}"'
    return settings(f"data.store={name}.h5", f"run.name={run}", f"run.start_from={base_of(name)}", named, *more)


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def hpcllm(folder: Path, *words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "hpcllm", *words], cwd=folder, env=environment, check=True)


def table(folder: Path) -> Iterator[str]:
    yield "| | step | minutes | reward, drawn in training | held-out reward |"
    yield "|---|---:|---:|---:|---:|"
    for name, family in FAMILIES.items():
        base, path = folder / f"base-{name}.json", folder / "runs" / f"grpo-{name}" / "log.jsonl"
        if base.exists():
            (task,) = json.loads(base.read_text(encoding="utf-8"))["tasks"]
            yield f"| `{name}:{family.size}` | base | | | {task['figures']['exact_match']['value']:.3f} |"
        for row in held_out(path) if path.exists() else ():
            yield f"| | {row['step']} | {row['minutes']:.0f} | {row['reward']:.2f} | {row['held_out']:.3f} |"


def held_out(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each validation of a log with the minutes of all starts up to it and the reward of the last logged step."""
    before_h, now_h, reward = 0.0, 0.0, 0.0
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "start" in record:
            before_h, now_h = before_h + now_h, 0.0
        now_h, reward = record.get("node_hours", now_h), record.get("reward", reward)
        if "validation_reward" in record:
            facts = {"step": record["step"], "minutes": 60 * (before_h + now_h), "reward": reward}
            yield facts | {"held_out": record["validation_reward"]}


if __name__ == "__main__":
    main()
