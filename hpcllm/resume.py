"""The folder of a run: where it goes on, what it keeps.

runs/NAME/run.toml                            the run file with every key written out
          job.txt                             which job holds the folder, see claim.py
          ranks.txt                           where each rank stands in the mesh, its process and node
          trace/step_00000010.json            what each rank did in a step, see pipeline/trace.py
          log.jsonl                           one object a logged step; TensorBoard events beside it
          checkpoints/step_00001000.h5        any layout reads it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from hpcllm.assemble import Parts
from hpcllm.checkpoint.folder import keep_newest, newest_valid
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import facts, restore, tokenizer_json
from hpcllm.checkpoint.state import RunState, save
from hpcllm.claim import Claim
from hpcllm.config import Config, to_tables
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.interchange.start import read_weights, same_tokens
from hpcllm.model.shapes import parameter_shapes
from hpcllm.together import on_root

# besides the model: other values would silently train on other samples, or from other weights
FIXED = ("run.seed", "data.sequence_length")


def resume(parts: Parts) -> tuple[int, int, Path | None]:
    """Load the newest sound checkpoint of the run folder, if there is one: step, position, its path.

    Collective over the mesh. Raises ConfigError if the checkpoint is of another model, CheckpointError.
    """
    world, folder = parts.mesh.world, parts.run_folder
    checkpoint, passed_over = newest_valid(folder / "checkpoints", world)
    if world.rank == 0 and passed_over:
        print("\n".join(passed_over), flush=True)
    step, position, path = 0, 0, None
    if parts.config.run.start_from and not checkpoint:
        _begin(parts)
    if checkpoint:
        with checkpoint:
            step, position = _load(parts, checkpoint)
        path = checkpoint.path
    on_root(world, lambda: _write_run_file(folder, parts.config))
    return step, position, path


def save_run(parts: Parts, claim: Claim, step: int, position: int) -> Path:
    """Write a checkpoint, then let the oldest go. Collective over the mesh.

    Raises CheckpointError, HpcllmError if the folder is another job's by now.
    """
    on_root(parts.mesh.world, claim.check)
    state = RunState(
        step=step,
        position=position,
        updates=parts.optimizer.updates,
        loss_scale=parts.loss_scale.value,
        good_steps=parts.loss_scale.good_steps,
        config=to_tables(parts.config),
        pieces=parts.optimizer.pieces_to_write(),
        shards=_shards(parts),
        owned=parts.owned,
        tokenizer_json=parts.store.tokenizer_json,
        mesh=parts.mesh.shape,
    )
    folder = parts.run_folder / "checkpoints"
    report = save(folder, state, parts.mesh.world)
    on_root(parts.mesh.world, lambda: len(keep_newest(folder, parts.config.checkpoint.keep)))
    return report.path


def _load(parts: Parts, checkpoint: Checkpoint) -> tuple[int, int]:
    known = facts(checkpoint)
    _check_same_run(parts, known.config, tokenizer_json(checkpoint), checkpoint.path)
    restore(checkpoint, _shards(parts), parts.optimizer.pieces_to_read())
    parts.optimizer.loaded(known.updates)
    if known.config["precision"]["compute"] == "fp16":  # others have none to go on with
        parts.loss_scale.restore(known.loss_scale, known.good_steps)
    if parts.mesh.world.rank == 0:
        print(f"goes on from {checkpoint.path} at step {known.step}", flush=True)
    return known.step, known.position


def _begin(parts: Parts) -> None:
    """Fill the weights from run.start_from. Collective over the mesh."""
    path = Path(parts.config.run.start_from)
    tokenizer = read_weights(path, _shards(parts), parts.optimizer.pieces_to_read(), parts.mesh.world)
    parts.optimizer.loaded(0)
    if parts.mesh.world.rank == 0:
        print(f"begins with the weights of {path}", flush=True)
        if tokenizer and not same_tokens(tokenizer, parts.store.tokenizer_json):
            print(f"note: the tokens of {parts.config.data.store!r} are not those of the weights", flush=True)


def _shards(parts: Parts) -> Shards:
    return Shards(parameter_shapes(parts.config.model), parts.mesh.tp.rank, parts.mesh.tp.size)


def _check_same_run(parts: Parts, stored: Mapping[str, Any], tokenizer: str, path: Path) -> None:
    """Raise ConfigError if going on under this run file would silently train something else."""
    before, now = _flat(stored), _flat(to_tables(parts.config))
    fixed = [key for key in now if key.startswith("model.") or key in FIXED]
    changed = [f"{key} = {now[key]!r}, was {before.get(key)!r}" for key in fixed if now[key] != before.get(key)]
    if tokenizer != parts.store.tokenizer_json:
        changed.append(f"data.store = {now['data.store']!r} has another tokenizer than {before.get('data.store')!r}")
    if changed:
        raise ConfigError(
            f"{path} was trained otherwise: {'; '.join(changed[:3])}. Take the old values, another run.name, "
            "or start anew with --restart (the old run folder is kept beside)"
        )


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}


def _write_run_file(folder: Path, config: Config) -> None:
    aside, path = folder / "run.toml.tmp", folder / "run.toml"
    try:
        aside.write_text(tomli_w.dumps(to_tables(config)), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise HpcllmError(f"cannot write {path}: {error.strerror}") from error
