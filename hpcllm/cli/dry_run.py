"""`--dry-run` of train and finetune: everything that they would reject before the first step, without starting it.

    RUN.toml --set ... --ranks N
      keys and values, mesh, model, schedule, layers            plan/resolve.py
      store: readable, long enough, of a vocabulary that fits   data/store.py   (if the run file names one)
      tuning file, checkpoint writer, machine
      run folder: can be locked; the newest checkpoint: of this run
      memory of its largest rank: no more than a device of run.machine has, or else this host
    --> what would run, the memory of its largest rank, the time of a step on run.machine

It writes nothing, and starts no MPI unless it was launched as a job. What only an allocation can tell: `preflight`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.cli.memory import PARTS
from hpcllm.cli.options import read_run
from hpcllm.cli.train import check as check_training
from hpcllm.collectives.tuning import load_tuning
from hpcllm.config import machines
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError, MeshError, UserError
from hpcllm.model.shapes import parameter_count
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.machine import read_machine
from hpcllm.plan.memory.predict import predict
from hpcllm.plan.memory.sizes import RankMemory
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.prediction import predict as predict_step
from hpcllm.plan.resolve import ResolvedRun, resolve
from hpcllm.plan.run_config import layout_of
from hpcllm.system.hardware.node import find_memory
from hpcllm.system.hardware.pci_devices import find_gpus
from hpcllm.system.job import run_with_or_without_mpi
from hpcllm.system.output import show
from hpcllm.system.text import size_text
from hpcllm.training.run_lock import check_lockable

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.data.store import TokenStore


@dataclass(frozen=True)
class Trial:
    """A run that train would begin, or go on with."""

    resolved: ResolvedRun
    tokens: int | None  # of the store to train on; None: the run file names no store yet
    epochs: float | None  # how many times the run reads them
    newest: Path | None  # the checkpoint that it would go on from
    largest: RankMemory
    step: Prediction | None
    unknown: str  # why there is no prediction of a step


def run(arguments: argparse.Namespace) -> int:
    """Print what would run. Of the ranks that were launched, if any, the first one does it. Raises UserError."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.mpi.collective_errors import on_root

        if comm and arguments.ranks not in (None, comm.size):
            words = f"--ranks {arguments.ranks}, but {comm.size} ranks were launched"
            raise MeshError(f"{words}; valid: {comm.size}, or leave it out")
        ranks = comm.size if comm else arguments.ranks
        return on_root(comm, lambda: _try(ranks))

    def _try(ranks: int | None) -> int:
        trial = tried(arguments.run, arguments.overrides, ranks, arguments.restart, arguments.check)
        show(arguments, as_dict(trial), lines(trial))
        return 0

    return run_with_or_without_mpi(job)


def tried(
    path: Path,
    overrides: list[str],
    ranks: int | None = None,
    restart: bool = False,
    check: Callable[[Config], None] = check_training,
) -> Trial:
    """Check a run file for so many ranks (None: those of its mesh). Writes nothing. Raises UserError.

    check: of the command that is to run it.
    """
    config = read_run(path, overrides)
    check(config)
    resolved = resolve(config, ranks)
    config, schedule, tokens, times, store = resolved.config, resolved.schedule, None, None, None
    if config.data.store:
        from hpcllm.data.store import epochs, open_store  # only where there is a file to look at

        config, store = open_store(config, None)
        tokens, times = len(store.tokens("train")), epochs(config, store)
    if config.evaluation.tasks and store:
        from hpcllm.evaluation.measuring import prepare_of_run  # torch: only where there is something to measure

        prepare_of_run(config, store, None)
    if config.finetuning.kind == "grpo" and store:
        from hpcllm.finetuning.rollouts import held_out_prompts, training_prompts  # torch, as above

        training_prompts(config, store)
        held_out_prompts(config, store)
    if config.communication.tuning:
        load_tuning(config.communication.tuning)
    if config.checkpoint.writer == "mpio":
        from hpcllm.checkpoint.writer import check_writer  # an h5py that can write so starts MPI

        check_writer(config.checkpoint.writer)
    folder = Path(config.run.folder) / config.run.name
    check_lockable(folder)
    newest = None if restart else _newest(folder, config, store)
    if newest is None and config.run.start_from and store:
        from hpcllm.data.model_texts import check_fit

        check_fit(config, store)
    largest = _largest(resolved)
    _check_memory(resolved, largest)
    return Trial(resolved, tokens, times, newest, largest, *_step(config, schedule))


def _largest(resolved: ResolvedRun) -> RankMemory:
    stages = (predict(resolved.config, resolved.schedule, stage) for stage in range(resolved.config.mesh.pp))
    return max(stages, key=lambda rank: rank.total)


def _check_memory(resolved: ResolvedRun, largest: RankMemory) -> None:
    """Raise MeshError if the largest rank alone is more than a device of run.machine has, or else this host."""
    where, has, need_of = _room(resolved.config)
    if need_of(largest) <= has:
        return
    parts = ", ".join(f"{part} {size_text(size)}" for part in PARTS if (size := getattr(largest, part)))
    fitting = next((f"{key} = {size} would fit" for key, size in _wider(resolved, need_of, has)), "no mesh tried fits")
    raise MeshError(
        f"the largest rank needs {size_text(need_of(largest))} of tensors (predicted: {parts}), but {where} has "
        f"{size_text(has)}; {fitting}, and lowered it is by optimizer.shard, precision.compute, pipeline.recompute and "
        "more pipeline.microbatches: `memory RUN.toml` shows it"
    )


def _room(config: Config) -> tuple[str, float, Callable[[RankMemory], float]]:
    """Return where a rank's tensors will be, how many bytes fit there, and which of them count."""
    if config.run.machine and config.run.device != "cpu" and "device" in machines.load(config.run.machine):
        device = read_machine(config.run.machine).device
        return f"a device of run.machine = {config.run.machine!r}", device.usable_bytes, lambda rank: rank.on_device
    host = find_memory().usable_bytes or math.inf
    if config.run.device != "cpu" and find_gpus():  # whose memory only their driver knows
        return "this host", host, lambda rank: rank.in_host
    return "this host (run.machine names another to compare with)", host, lambda rank: rank.total


def _wider(resolved: ResolvedRun, need_of: Callable[[RankMemory], float], has: float) -> Iterator[tuple[str, int]]:
    """Yield meshes of more stages, or more tp ranks, on which the largest rank fits."""
    mesh = resolved.config.mesh
    for size in (2**power for power in range(1, 9)):
        for axis in ("pp", "tp"):
            wider = replace(mesh, **{axis: size * getattr(mesh, axis)})
            try:
                tried = resolve(replace(resolved.config, mesh=wider), size * resolved.ranks)
                fits = need_of(_largest(tried)) <= has
            except UserError:  # does not divide the model
                continue
            if fits:
                yield f"mesh.{axis}", size * getattr(mesh, axis)


def _newest(folder: Path, config: Config, store: TokenStore | None) -> Path | None:
    """The newest checkpoint of the run folder, which has to be of this run; its tensors are not read."""
    if not (folder / "checkpoints").is_dir():
        return None
    from hpcllm.checkpoint.folder import newest_first
    from hpcllm.checkpoint.reader import Checkpoint
    from hpcllm.checkpoint.restore import tokenizer_json
    from hpcllm.checkpoint.state import facts  # torch: only where there may be something to go on from
    from hpcllm.training.compatibility import as_begun, check_same_run

    path = next(iter(newest_first(folder / "checkpoints")), None)
    if path and store:
        with Checkpoint.open(path) as checkpoint:
            check_same_run(as_begun(config), store, facts(checkpoint), tokenizer_json(checkpoint), path)
    return path


def _step(config: Config, schedule: Schedule) -> tuple[Prediction | None, str]:
    if not config.run.machine:
        return None, "run.machine is not set"
    try:
        machine = read_machine(config.run.machine)
        model, layout = layout_of(config, schedule.placement.chunks)
        return predict_step(machine, model, layout, config.data.global_batch), ""
    except ConfigError as error:  # of the planner, which knows less than the trainer can
        return None, str(error)


def as_dict(trial: Trial) -> dict[str, Any]:
    """Answer for --json: sizes in bytes, times in seconds."""
    config, step = trial.resolved.config, trial.step
    return {
        "accepted": True,
        "finetuning": config.finetuning.kind,
        "ranks": trial.resolved.ranks,
        "mesh": {"dp": config.mesh.dp, "pp": config.mesh.pp, "tp": config.mesh.tp},
        "parameters": parameter_count(config.model),
        "tokens_in_store": trial.tokens,
        "epochs": trial.epochs,
        "goes_on_from": None if trial.newest is None else str(trial.newest),
        "bubble": trial.resolved.bubble,
        "largest_rank_bytes": trial.largest.total,
        "iteration_time_s": step.iteration_time_s if step else None,
        "fits": step.fits if step else None,
    }


def lines(trial: Trial) -> list[str]:
    """Lines of the answer for people."""
    config, resolved, largest = trial.resolved.config, trial.resolved, trial.largest
    mesh, pipeline, run, kind = config.mesh, config.pipeline, config.run, config.finetuning.kind
    size = config.data.global_batch // mesh.dp // pipeline.microbatches
    begins = f"begins at step 0 of {run.steps} in {Path(run.folder) / run.name}"
    folder = f"goes on from {trial.newest}, up to step {run.steps}" if trial.newest else begins
    device, host = size_text(largest.on_device), size_text(largest.in_host)
    beside = "for writing checkpoints" + " and what is offloaded" * bool(largest.offloaded)
    verb = "train" if kind == "none" else f"fine-tune ({kind})"
    return [
        f"would {verb} {run.name}: {parameter_count(config.model):,} parameters in {config.precision.compute} on "
        f"{resolved.ranks} ranks, dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, shard {config.optimizer.shard!r}",
        f"  schedule    {resolved.schedule.name}, proved: {pipeline.microbatches} microbatches of {size} "
        f"sample{'s' * (size > 1)}, bubble {resolved.bubble:.0%}, recompute {pipeline.recompute!r}",
        f"  data        {_data(trial)}",
        f"  folder      {folder}",
        f"  memory      {device} of tensors on the largest rank, and {host} of the host's {beside} (predicted)",
        f"  step        {_time(trial)}",
        "accepted; nothing was started or written. Devices, network and disks of an allocation: `preflight` in the job",
    ]


def _data(trial: Trial) -> str:
    data = trial.resolved.config.data
    if trial.tokens is None or trial.epochs is None:
        return "data.store is not given yet: train needs it; `python -m hpcllm prepare` writes one"
    step = data.global_batch * data.sequence_length
    from hpcllm.data.store import epochs_note

    read = f"read {trial.epochs:.3g} times in {trial.resolved.config.run.steps} steps"
    note = epochs_note(trial.epochs)
    return f"{data.store}: {trial.tokens:,} tokens, {step:,} a step, {read}{'; WARNING: ' if note else ''}{note}"


def _time(trial: Trial) -> str:
    step = trial.step
    if step is None:
        return f"not predicted: {trial.unknown}"
    short = "; NOT ENOUGH MEMORY on a device of it (predicted): `plan --layout` says what holds how much"
    return (
        f"{step.iteration_time_s:.3g} s on {step.machine.name}, {step.tokens_per_s:,.0f} tokens/s, "
        f"MFU {step.mfu:.1%} (predicted){'' if step.fits else short}"
    )
