"""The folder of a run: where it goes on. What it keeps, and when: saving.py.

runs/NAME/run.toml                            the run file with every key written out
          job.txt                             which job holds the folder, see claim.py
          ranks.txt                           where each rank stands in the mesh, its process and node
          trace/step_00000010.json            what each rank did in a step, see pipeline/trace.py
          log.jsonl                           one object a logged step; TensorBoard events beside it
          checkpoints/step_00001000.h5        any layout reads it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from hpcllm.assemble import Parts
from hpcllm.checkpoint.facts import facts
from hpcllm.checkpoint.folder import load_newest
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore, tokenizer_json
from hpcllm.checkpoint.retention import sweep
from hpcllm.checkpoint.surplus import restore_surplus
from hpcllm.config import Config, to_tables
from hpcllm.errors import HpcllmError
from hpcllm.interchange.start import read_weights, same_tokens
from hpcllm.same_run import check_same_run
from hpcllm.saving import shards_of, surplus_of
from hpcllm.together import on_root


def resume(parts: Parts) -> tuple[int, int, Path | None]:
    """Load the newest sound checkpoint of the run folder, if there is one: step, position, its path.

    Collective over the mesh. Raises ConfigError if the checkpoint is of another model, CheckpointError.
    """
    world, folder = parts.mesh.world, parts.run_folder
    on_root(world, lambda: len(sweep(folder / "checkpoints")))
    found, passed_over = load_newest(folder / "checkpoints", world, lambda checkpoint: _load(parts, checkpoint))
    said = [*passed_over, *(found.lines if found else [])]
    if world.rank == 0 and said:
        print("\n".join(said), flush=True)
    if found is None and parts.config.run.start_from:
        _begin(parts)
    on_root(world, lambda: _write_run_file(folder, parts.config))
    return (found.step, found.position, found.path) if found else (0, 0, None)


@dataclass(frozen=True)
class _Loaded:
    step: int
    position: int
    path: Path
    lines: list[str]  # for people


def _load(parts: Parts, checkpoint: Checkpoint) -> _Loaded:
    known = facts(checkpoint)
    tokenizer = on_root(parts.mesh.world, lambda: tokenizer_json(checkpoint))
    check_same_run(parts.config, parts.store.tokenizer_json, known.config, tokenizer, checkpoint.path)
    restore(checkpoint, shards_of(parts), parts.optimizer.pieces_to_read())
    surplus = surplus_of(parts)
    lost = restore_surplus(checkpoint, surplus) if surplus else ""
    parts.optimizer.loaded(known.updates)
    if known.config.get("precision", {}).get("compute") == "fp16":  # others have none to go on with
        parts.loss_scale.restore(known.loss_scale, known.good_steps)
    lines = [f"goes on from {checkpoint.path} at step {known.step}"]
    lines += [f"error feedback begins anew, owing nothing: {lost}"] if lost else []
    return _Loaded(known.step, known.position, checkpoint.path, lines)


def _begin(parts: Parts) -> None:
    """Fill the weights from run.start_from. Collective over the mesh."""
    path = Path(parts.config.run.start_from)
    tokenizer = read_weights(path, shards_of(parts), parts.optimizer.pieces_to_read(), parts.mesh.world)
    parts.optimizer.loaded(0)
    if parts.mesh.world.rank == 0:
        print(f"begins with the weights of {path}", flush=True)
        if tokenizer and not same_tokens(tokenizer, parts.store.tokenizer_json):
            print(f"note: the tokens of {parts.config.data.store!r} are not those of the weights", flush=True)


def _write_run_file(folder: Path, config: Config) -> None:
    aside, path = folder / "run.toml.tmp", folder / "run.toml"
    try:
        aside.write_text(tomli_w.dumps(to_tables(config)), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise HpcllmError(f"cannot write {path}: {error.strerror}") from error
