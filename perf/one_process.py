"""One process: a step of ours beside a plain PyTorch loop and torch.compile of its model and loss, in turns.

    python perf/one_process.py STORE [--rounds 20] [--threads 2] [--models tiny 30M]

Each variant has a process of its own, and they take turns step by step: what else the machine does meets all of them.
The first steps, in which kernels are compiled and memory is asked for, do not count. Same model, weights, samples and
AdamW. Ratios are of a step's time to ours in the same round: above 1, ours is faster. Writes one_process.json and .md
beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "jobscripts" / "local" / "tiny.toml"
WARM_UP_STEPS = 4
OURS = "ours"
VARIANTS = (OURS, "plain PyTorch", "torch.compile")
MODELS = {  # keys of a run file beside those of tiny
    "tiny": {},
    "30M": {
        "model.layers": 8,
        "model.hidden": 512,
        "model.heads": 8,
        "model.ffn": 1408,
        "data.sequence_length": 256,
        "data.global_batch": 8,
    },
}


def our_steps(settings: list[str], steps: int) -> Iterator[float]:
    """Yield the seconds of each step, from the first pass to the update."""
    import time

    from mpi4py import MPI

    from hpcllm.config import schema as configs
    from hpcllm.optim.adamw import learning_rate
    from hpcllm.training.requests import NO_REQUESTS
    from hpcllm.training.setup import open_run
    from hpcllm.training.step import agree, forward_backward, update

    with open_run(configs.load(RUN_FILE, settings), MPI.COMM_WORLD) as run:
        for step in range(steps):
            start, config = time.perf_counter(), run.config
            local = forward_backward(run, step, step * config.data.global_batch)
            agreed = agree(run, local, NO_REQUESTS, run.traffic())
            update(run, agreed.gradient_norm, learning_rate(step, config.run.steps, config.optimizer))
            yield time.perf_counter() - start


def work(variant: str, settings: list[str], steps: int) -> None:
    """Make a step for each line that comes in, and answer with its seconds."""
    if variant == OURS:
        seconds = our_steps(settings, steps)
    else:
        import plain_torch

        seconds = (s for s, _ in plain_torch.plain_steps(RUN_FILE, settings, steps, compiled=variant == VARIANTS[2]))
    for _ in sys.stdin:
        print(f"step_s={next(seconds)}", flush=True)


class Worker:
    """A process that makes steps of one variant when asked."""

    def __init__(self, variant: str, settings: list[str], steps: int, threads: int) -> None:
        command = [sys.executable, __file__, "--work", variant, "--steps", str(steps), "--settings", *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def step(self) -> float:
        """Return the seconds of the next step."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("step_s="):
                return float(line.removeprefix("step_s="))
        raise SystemExit(f"a worker ended with exit code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measured(model: str, store: str, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each step of each variant, in the order of the rounds."""
    steps = rounds + WARM_UP_STEPS
    keys = {"mesh.pp": 1, "pipeline.microbatches": 1, "data.store": store, "data.document_mask": False}
    keys |= {
        "data.validation_sequences": 1,
        "log.trackers": [],
        "run.steps": steps,
        "run.folder": tempfile.gettempdir(),
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in (keys | MODELS[model]).items()]
    workers = {variant: Worker(variant, settings, steps, threads) for variant in VARIANTS}
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(steps):
        for variant, worker in workers.items():
            found[variant].append(worker.step())
    for worker in workers.values():
        worker.close()
    return {variant: seconds[WARM_UP_STEPS:] for variant, seconds in found.items()}


def table(results: dict[str, dict[str, list[float]]]) -> str:
    rows = ["| model, threads | variant | median step, s | fastest | time over ours, median | 10 % | 90 % |",
            "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for model, found in results.items():
        for variant, seconds in found.items():
            ratios = sorted(s / own for s, own in zip(seconds, found[OURS], strict=True))
            ends = [ratios[round(share * (len(ratios) - 1))] for share in (0.5, 0.1, 0.9)]
            numbers = " | ".join(f"{ratio:.3f}" for ratio in ends)
            rows.append(f"| {model} | {variant} | {statistics.median(seconds):.4f} | {min(seconds):.4f} | {numbers} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.settings, arguments.steps)
        return
    store = str(Path(arguments.store).resolve())
    results = {
        f"{model}, {arguments.threads}": measured(model, store, arguments.rounds, arguments.threads)
        for model in arguments.models
    }
    text = table(results)
    (HERE / "one_process.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    (HERE / "one_process.md").write_text(
        f"Made by one_process.py, {os.cpu_count()} cores.\n\n{text}\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
