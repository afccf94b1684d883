"""Where and with what a start of a run trains: one record of log.jsonl, for those who read it a year later."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import hpcllm
from hpcllm.assemble import Parts
from hpcllm.checkpoint.facts import versions
from hpcllm.device import facts
from hpcllm.hardware.lists import nodes_text
from hpcllm.hardware.node import find_hardware

GIT_LIMIT_S = 5.0
SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


def surroundings(parts: Parts, nodes: int, devices: int) -> dict[str, Any]:
    """For rank 0: time, place, devices, versions. nodes, devices: of the job; devices are GPUs, or else cores."""
    device = parts.device
    name = facts(device).text if device.type != "cpu" else find_hardware().processor
    slurm = {key.removeprefix("SLURM_").lower(): os.environ[key] for key in SLURM if key in os.environ}
    return {
        "time": now(),
        "ranks": parts.mesh.world.size,
        "nodes": nodes,
        "hosts": nodes_text(line.rpartition(" on ")[2] for line in parts.watch.lines()),
        "mesh": parts.mesh.shape,
        "devices": devices,
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "bubble": parts.bubble,
        "machine": parts.config.run.machine,
        "slurm": slurm,
        "commit": _commit(),
        "versions": {name: " ".join(version.split()) for name, version in versions().items()},
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> str:
    """Of the checkout that we run from, with + where files were changed since; "" for an installed package."""
    folder = Path(hpcllm.__file__).parent.parent
    if not (folder / ".git").exists():
        return ""
    ask = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
