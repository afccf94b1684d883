"""A run that begins with the weights of a Hugging Face folder or a checkpoint: `run.start_from`.

    before anything is built   the model's shape comes from there   take_model
    at step 0                  each rank reads its own part         read_weights     a resumed run has no need of it

Neither goes through a conversion: a folder is read in place, box by box, whatever the layout of the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcllm.checkpoint.facts import facts
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.layout import MASTER, MODEL
from hpcllm.checkpoint.locate import is_ours
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore, tokenizer_json
from hpcllm.config import Config, ModelConfig, check_together, from_tables
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.interchange.architectures import canonical
from hpcllm.interchange.contents import read_contents
from hpcllm.interchange.dtype import as_tensor
from hpcllm.interchange.folder import Folder, which
from hpcllm.optim.pieces import Piece
from hpcllm.together import on_root, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI


def take_model(config: Config, comm: MPI.Intracomm | None = None) -> Config:
    """The config with the model of run.start_from; as it is if there is none. Collective over comm; None: one process.

    Raises ConfigError if [model] says something else, InterchangeError, CheckpointError.
    """
    if not config.run.start_from:
        return config
    found = on_root(comm, lambda: model_of(_source(config)))
    asked = canonical(config.model)
    if config.model != ModelConfig():
        differ = [
            f"model.{key} = {value!r}, there {getattr(found, key)!r}"
            for key, value in dataclasses.asdict(asked).items()
            if value != getattr(found, key) and (key, value) != ("vocabulary", 0)
        ]
        if differ:
            raise ConfigError(
                f"run.start_from = {config.run.start_from!r} holds another model: {'; '.join(differ[:3])}; "
                "leave [model] out to take the one that is there"
            )
    config = dataclasses.replace(config, model=found)
    check_together(config)
    return config


def model_of(path: Path) -> ModelConfig:
    """The model of a folder or a checkpoint. Not collective. Raises UserError, CheckpointError."""
    if not path.exists():
        raise ConfigError(f"run.start_from = {str(path)!r} is not there; valid: a Hugging Face folder or a checkpoint")
    path, is_folder = which(path)
    if is_folder:
        return read_contents(path).model
    if not is_ours(path):
        raise ConfigError(f"run.start_from = {str(path)!r} is no checkpoint of ours; of a Hugging Face folder, name it")
    with Checkpoint.open(path) as checkpoint:
        return canonical(from_tables(facts(checkpoint).config).model)


def read_weights(path: Path, shards: Shards, pieces: Sequence[Piece], comm: MPI.Intracomm) -> str:
    """Fill this rank's weights in place, and its master weights where it has them. Collective over comm.

    pieces: of any kind; moments stay as they are. Values are converted to the type of the piece. Returns the tokenizer
    that belongs to the weights, as JSON; empty if there is none. Raises InterchangeError, CheckpointError on all ranks.
    """
    weights = [piece for piece in pieces if piece.kind in (MODEL, MASTER)]
    path, is_folder = on_root(comm, lambda: which(path))
    if is_folder:
        with Folder.open(path, comm) as folder:
            _fill(folder, shards, weights, comm)
            return folder.tokenizer_json
    with Checkpoint.open(path, comm) as checkpoint:
        restore(checkpoint, shards, weights)
        return on_root(comm, lambda: tokenizer_json(checkpoint))


def same_tokens(one: str, other: str) -> bool:
    """Whether two tokenizers, as JSON, give the same numbers to the same pieces of text."""
    models = [json.loads(text).get("model") for text in (one, other)]
    tables = [model.get("vocab") if isinstance(model, dict) else None for model in models]
    return bool(tables[0] == tables[1])


def _source(config: Config) -> Path:
    """Where the model stands: a run that has begun goes on also when its beginning is gone."""
    path = Path(config.run.start_from)
    newest = newest_first(Path(config.run.folder) / config.run.name / "checkpoints")
    return newest[0] if newest and not path.exists() else path


@torch.no_grad()
def _fill(folder: Folder, shards: Shards, pieces: Sequence[Piece], comm: MPI.Intracomm) -> None:
    error = None
    try:
        for piece in pieces:
            for slab, out in shards.slabs(dataclasses.replace(piece, kind=MODEL)):
                out.copy_(as_tensor(folder.read(slab), folder.specs[slab.dataset].dtype))
    except HpcllmError as fault:
        error = fault
    raise_together(comm, error)
