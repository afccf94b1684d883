"""Resuming a run from its folder, or beginning it. Which checkpoints are kept, and when: saving.py.

runs/NAME/run.toml                            the run file with every key written out
          job.txt                             which job holds the folder, see run_lock.py
          ranks.txt                           place of each rank in the mesh, its process and node
          trace/step_00000010.json            times of each rank in a step, see pipeline/trace.py
          finished                            record of the end, see finished.py
          log.jsonl                           one object a logged step; TensorBoard events beside it
          checkpoints/step_00001000.h5        any layout reads it
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from hpcllm.checkpoint.folder import load_newest, sweep
from hpcllm.checkpoint.huggingface.base import check_base
from hpcllm.checkpoint.huggingface.start import read_weights
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore, restore_residuals, tokenizer_json
from hpcllm.checkpoint.state import facts
from hpcllm.config.schema import Config, to_tables
from hpcllm.data.model_texts import check_fit
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.output import say, write_whole
from hpcllm.training.compatibility import check_same_run
from hpcllm.training.finished import remove_finished

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext


def resume(run: RunContext) -> tuple[int, int, Path | None]:
    """Load the newest sound checkpoint of the run folder, if there is one. Returns step, position and its path.

    Lets the objective begin before, for it may need the weights of run.start_from in the place of the run's. Collective
    over the mesh. Raises ConfigError if the checkpoint is of another model, CheckpointError.
    """
    world, folder = run.mesh.world, run.run_folder
    on_root(world, lambda: len(sweep(folder / "checkpoints")))
    run.objective.begin(run)
    found, passed_over = load_newest(folder / "checkpoints", world, lambda checkpoint: _load(run, checkpoint))
    step, position, path, lines = found or (0, 0, None, [])
    if world.rank == 0 and (passed_over or lines):
        say([*passed_over, *lines])
    if found is None and run.config.run.start_from:
        _begin(run)
    on_root(world, lambda: _begin_folder(folder, run.config, step))
    return step, position, path


def _load(run: RunContext, checkpoint: Checkpoint) -> tuple[int, int, Path, list[str]]:
    """Load a checkpoint that is of this run. Returns step, position, its path and lines for people. Collective."""
    known = facts(checkpoint)
    tokenizer = on_root(run.mesh.world, lambda: tokenizer_json(checkpoint))
    check_same_run(run.config, run.store, known, tokenizer, checkpoint.path)
    check_base(run.base, known.base, checkpoint.path, run.config.run.start_from)
    restore(checkpoint, run.shards, run.optimizer.pieces_to_read())
    residuals = run.residuals()
    lost = restore_residuals(checkpoint, residuals) if residuals else ""
    run.optimizer.loaded(known.updates)
    if known.config.get("precision", {}).get("compute") == "fp16":  # other precisions have no loss scale to continue
        run.loss_scale.restore(known.loss_scale, known.good_steps)
    lines = [f"goes on from {checkpoint.path} at step {known.step}"]
    lines += [f"error feedback begins anew, with residuals of zero: {lost}"] if lost else []
    return known.step, known.position, checkpoint.path, lines


def read_start(run: RunContext) -> None:
    """Fill the weights from run.start_from; adapters are nothing so far. Collective over the mesh."""
    if not run.base:  # else it is read by then
        read_weights(Path(run.config.run.start_from), run.shards, run.optimizer.pieces_to_read(), run.mesh.world)
        run.optimizer.loaded(0)


def _begin(run: RunContext) -> None:
    """Begin with the weights of run.start_from. Collective over the mesh. Raises UserError, CheckpointError."""
    notes = on_root(run.mesh.world, lambda: check_fit(run.config, run.store))
    read_start(run)
    if run.mesh.world.rank == 0:
        say([f"begins with the weights of {run.config.run.start_from}", *notes])


def _begin_folder(folder: Path, config: Config, step: int) -> None:
    """Write run.toml; remove the record of an earlier end if there are steps to make. Raises HpcllmError."""
    if step < config.run.steps:
        remove_finished(folder)
    path = folder / "run.toml"
    try:
        write_whole(path, tomli_w.dumps(to_tables(config)))
    except OSError as error:
        raise HpcllmError(f"cannot write {path}: {error.strerror}") from error
