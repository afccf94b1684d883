"""Description of a start of a run: the lines that it prints, and one record of log.jsonl to be read a year later."""

from __future__ import annotations

import datetime
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

import hpcllm
from hpcllm.checkpoint.state import versions
from hpcllm.codecs.gpu.launch import why_no_kernels
from hpcllm.collectives.selection import unmeasured
from hpcllm.config.schema import Config, traffic_codecs
from hpcllm.data.store import epochs, epochs_note
from hpcllm.model.documents import takes_varlen
from hpcllm.model.shapes import parameter_count
from hpcllm.mpi.gpu_aware_marker import GPU_AWARE_MPI
from hpcllm.plan.rank_order.traffic import staged_s, staged_text
from hpcllm.system.device import device_facts, torch_dtype
from hpcllm.system.hardware.node import find_hardware, multiplies
from hpcllm.system.slurm import nodes_text

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext

GIT_LIMIT_S = 5.0
SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


def start_lines(run: RunContext) -> list[str]:
    """Return what rank 0 prints before the first step: model, layout, device, MPI library, where messages lie."""
    config, shape, placement = run.config, run.mesh.shape, run.schedule.placement
    model = config.run.start_from or config.model.preset
    chunks = f" and {placement.chunks} chunks a rank" if placement.chunks > 1 else ""
    # 'Open MPI v5.0.11': what the library says of itself, cut before the particulars of its build
    library = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())
    lines = [
        f"{config.run.name}: {parameter_count(config.model) / 1e6:.2f} M parameters ({model}), "
        f"dp={shape['dp']} pp={shape['pp']} tp={shape['tp']}, {run.schedule.name} with "
        f"{config.pipeline.microbatches} microbatches{chunks} (bubble {100 * run.bubble:.0f} %), "
        f"{run.device_setup.text}, {library}"
    ]
    if config.finetuning.kind != "none":
        lines.append(_finetuning_line(run))
    if reach := run.device_setup.mpi_access:
        lines.append(f"messages lie in {'device' if reach.direct else 'pinned host'} memory: {reach.why}")
        if not reach.direct and run.mesh.node.size == run.mesh.world.size:
            lines.append(f"warning: {staged_text(staged_s(config, placement))}; {GPU_AWARE_MPI}")
    if why := why_no_kernels(run.device.type):
        lines.append(f"warning: no kernels for codecs and model: {why}")
    if text := _window_text(config, run.device):
        lines.append(text)
    if config.optimizer.warmup_steps >= config.run.steps:
        lines.append(f"note: the learning rate warms up for {config.optimizer.warmup_steps} steps, longer than the run")
    if run.device.type == "cpu" and not multiplies(compute := config.precision.compute):
        lines.append(
            f"warning: precision.compute = {compute!r}, but this CPU has no instructions for it: products of matrices "
            "take 8 to 40 times as long as with 'fp32'"
        )
    if run.tuning and (unknown := unmeasured(traffic_codecs(config.communication).values(), run.tuning.rates)):
        lines.append(
            f"warning: {config.communication.tuning} has no rates of {', '.join(unknown)}, so that travels raw; "
            "measure with `python -m hpcllm.perf tune RUN.toml`"
        )
    if config.finetuning.kind != "grpo" and (repeated := epochs_note(epochs(config, run.store))):
        lines.append(f"warning: {repeated}")
    return lines


def _window_text(config: Config, device: torch.device) -> str:
    """Return a note on attention with a window, "" where a flash kernel has it."""
    window, sequence = config.model.window, config.data.sequence_length
    has_kernel = takes_varlen(device, torch_dtype(config.precision.compute)) and not config.model.compile
    if device.type == "cpu" or has_kernel or not 0 < window < sequence:
        return ""
    repeated = (
        ", keys and values repeated for each query head" if config.model.key_value_heads != config.model.heads else ""
    )
    return (
        f"note: the window of {window} tokens takes a mask of {sequence} x {sequence}{repeated}: no flash kernel has it"
    )


def _finetuning_line(run: RunContext) -> str:
    """Say what a fine-tuning learns: 'supervised fine-tuning on chats: 12,345 of 30,000 tokens are targets (41 %)'."""
    header = run.store.header
    if run.config.finetuning.kind == "grpo":
        reward = run.config.finetuning.reward
        prompts = run.config.data.global_batch // reward.samples
        by = f"{reward.function} of {reward.file}" if reward.file else "the answer, exactly"
        return f"grpo on {reward.prompts}, rewarded by {by}: {prompts} prompts a step, {reward.samples} texts of each"
    tokens = header.tokens["train"]
    targets = header.counted.get("train", tokens)
    of_text = "; of a text all are, so this goes on with the training before" if header.kind == "text" else ""
    return (
        f"{run.config.finetuning.kind} fine-tuning on {header.kind}: {targets:,} of {tokens:,} tokens are targets "
        f"({100 * targets / max(1, tokens):.0f} %){of_text}"
    )


def run_info(run: RunContext, nodes: int, devices: int) -> dict[str, Any]:
    """Return time, place, devices and versions. For rank 0. nodes, devices: of the job; devices are GPUs or cores."""
    device = run.device
    name = device_facts(device).text if device.type != "cpu" else find_hardware().processor
    slurm = {key.removeprefix("SLURM_").lower(): os.environ[key] for key in SLURM if key in os.environ}
    return {
        "time": utc_now(),
        "ranks": run.mesh.world.size,
        "nodes": nodes,
        "hosts": nodes_text(line.rpartition(" on ")[2] for line in run.watchdog.lines()),
        "mesh": run.mesh.shape,
        "devices": devices,
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "bubble": run.bubble,
        "machine": run.config.run.machine,
        "slurm": slurm,
        "flux_job": os.environ.get("FLUX_ENCLOSING_ID", ""),
        "commit": _commit(),
        "versions": {name: " ".join(version.split()) for name, version in versions().items()},
    }


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> str:
    """Commit of the checkout that runs, with + where files were changed since; "" for an installed package."""
    folder = Path(hpcllm.__file__).parent.parent
    if not (folder / ".git").exists():
        return ""
    ask = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
