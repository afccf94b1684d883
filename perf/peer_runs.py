"""A run of ours or of a peer in fresh processes, on this machine or on the cluster of cluster.sh, and its steps.

    our_run    python -m hpcllm train                               the step records of its own log
    peer_run   python perf/plain_torch.py, by hook                  the same of what its loop says

Both train the preset of tiny.toml with the same keys. A peer's glibc can be told to keep memory
between calls, as our ranks tell it by themselves. Scripts that compare import this; it measures nothing by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUN_FILE = ROOT / "jobscripts" / "local" / "tiny.toml"
CLUSTER = ["bash", str(HERE / "cluster.sh")]
ONE_NODE = ["bash", str(ROOT / "jobscripts" / "local" / "mpirun.sh")]
LIMIT_S = 900
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30)}
OF_30M = {"model.layers": 8, "model.hidden": 512, "model.heads": 8, "model.ffn": 1408}
MEETING_PLACE = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
Keys = Mapping[str, Any]  # of a run file, as --set takes them


@dataclass(frozen=True)
class Ranks:
    """Ranks to start a command on."""

    count: int
    on_cluster: bool
    folders: Sequence[str] = ()  # to import from, beside ours
    threads: int = 1  # of each rank

    def run(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
        """Return what the command prints; end this program if it fails."""
        paths = [str(ROOT), *self.folders, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **(MEETING_PLACE if self.on_cluster else {}),
            **(variables or {}),
            "OMP_NUM_THREADS": str(self.threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # not that the hosts have no name server
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        launcher = [*CLUSTER, "run", "-n", str(self.count)] if self.on_cluster else [*ONE_NODE, str(self.count)]
        done = subprocess.run(
            [*launcher, *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout


def common_keys(shape: Keys, store: str, sequence_length: int, sequences: int) -> dict[str, Any]:
    """What all that are compared have in common: one step's tokens, no pipeline."""
    return {
        **shape,
        "data.store": store,
        "data.sequence_length": sequence_length,
        "data.global_batch": sequences,
        "data.document_mask": False,  # the peers have none
        "mesh.pp": 1,
        "pipeline.microbatches": 1,
    }


def peer_run(ranks: Ranks, hook: str, keys: Keys, steps: int, keeps_memory: bool) -> list[dict[str, Any]]:
    """Return a record a step, step_s and loss: rank 0's seconds, the mean of the ranks' losses."""
    program = ["python", str(HERE / "plain_torch.py"), str(RUN_FILE), hook, str(steps)]
    command = [*program, *_settings({**keys, "run.steps": steps})]
    output = ranks.run(command, KEEP_MEMORY if keeps_memory else None)
    run = json.loads([line for line in output.splitlines() if line.startswith('{"seconds"')][-1])
    return [{"step_s": step_s, "loss": loss} for step_s, loss in zip(run["seconds"], run["losses"], strict=True)]


def our_run(ranks: Ranks, keys: Keys, steps: int) -> list[dict[str, Any]]:
    """Return the step records of the run's own log."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "communication.exact_steps": 0,
            **keys,
            "run.folder": folder,
            "run.steps": steps,
            "data.validation_sequences": ranks.count,
            "log.every_steps": 1,
            "log.trackers": [],
            "checkpoint.every_steps": 0,
        }
        ranks.run(["python", "-m", "hpcllm", "train", str(RUN_FILE), *_settings(keys)])
        lines = (Path(folder) / "tiny" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "step_s" in record]


def _settings(keys: Keys) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]


def prepared(store: str | None, ranks: Ranks) -> str:
    """Return the path of the token store: the one that was named, or data/stdlib.h5, made if it is not there."""
    path = Path(store) if store else ROOT / "data" / "stdlib.h5"
    if not store and not path.exists():
        path.parent.mkdir(exist_ok=True)
        ranks.run(["python", "-m", "hpcllm", "prepare", "--output", str(path)])
    return str(path.resolve())


def ratio_text(times: Sequence[float], others: Sequence[float]) -> str:
    """How many times as long the others' steps take, by turns; bold where that is less."""
    ratios = [other / time for time, other in zip(times, others, strict=True)]
    mark = "**" if median(ratios) < 1 else ""
    return f"{mark}{median(ratios):.2f}{mark} ({min(ratios):.2f} to {max(ratios):.2f})"
