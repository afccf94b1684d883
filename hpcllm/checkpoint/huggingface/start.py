"""Begin a run with the weights of a Hugging Face folder or a checkpoint: `run.start_from`.

    before anything is built   the model's shape comes from there   take_model
    at step 0                  each rank reads its own part         read_weights     a resumed run has no need of it

Neither goes through a conversion: a folder is read in place, box by box, whatever the layout of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcllm.checkpoint.directory import is_ours
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.huggingface.architectures import canonical
from hpcllm.checkpoint.huggingface.folder import Folder, read_contents, which
from hpcllm.checkpoint.layout import MASTER, MODEL
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore
from hpcllm.checkpoint.state import Shards, as_tensor, facts
from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.config.schema import Config, ModelConfig, check_together, from_tables
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import on_all, on_root
from hpcllm.optim.flat_buffers import Piece

if TYPE_CHECKING:
    from mpi4py import MPI


def take_model(config: Config, comm: MPI.Intracomm | None = None) -> Config:
    """Take the model of run.start_from into the config, if it is set. Collective over comm; None: one process.

    Raises ConfigError if [model] differs, HuggingFaceError, CheckpointError.
    """
    if not config.run.start_from:
        return config
    found = on_root(comm, lambda: model_of(_source(config)))
    requested = canonical(config.model)
    if config.model != ModelConfig():
        differ = [
            f"model.{key} = {value!r}, there {getattr(found, key)!r}"
            for key, value in dataclasses.asdict(requested).items()
            if value != getattr(found, key) and (key, value) != ("vocabulary", 0)
        ]
        if differ:
            raise ConfigError(
                f"run.start_from = {config.run.start_from!r} holds another model: {'; '.join(differ[:3])}; "
                "leave [model] out to take the one that is there"
            )
    config = dataclasses.replace(config, model=dataclasses.replace(found, compile=config.model.compile))
    check_together(config)
    return config


def model_of(path: Path) -> ModelConfig:
    """The model of a folder or a checkpoint. Not collective. Raises UserError, CheckpointError."""
    if fault := fault_of(path):
        raise ConfigError(f"run.start_from = {shown(str(path))} cannot be looked at: {fault}")
    if not path.exists():
        raise ConfigError(f"run.start_from = {str(path)!r} is not there; valid: a Hugging Face folder or a checkpoint")
    if path.is_file() and not is_ours(path):
        raise ConfigError(f"run.start_from = {str(path)!r} is no checkpoint of ours; of a Hugging Face folder, name it")
    path, is_folder = which(path)
    if is_folder:
        return read_contents(path).model
    with Checkpoint.open(path) as checkpoint:
        return canonical(from_tables(facts(checkpoint).config).model)


def read_weights(path: Path, shards: Shards, pieces: Sequence[Piece], comm: MPI.Intracomm) -> None:
    """Fill this rank's weights in place, and its master weights where it has them. Collective over comm.

    pieces: of any kind; moments stay as they are. Values are converted to the type of the piece. Raises
    HuggingFaceError, CheckpointError on all ranks.
    """
    weights = [piece for piece in pieces if piece.kind in (MODEL, MASTER)]
    with open_weights(path, comm) as source:
        fill_weights(source, shards, weights)


@contextmanager
def open_weights(path: Path, comm: MPI.Intracomm | None) -> Iterator[Checkpoint | Folder]:
    """Open whole weights. Collective over comm. Raises ConfigError, HuggingFaceError, CheckpointError on all ranks."""
    path, is_folder = on_root(comm, lambda: which(path))
    with Folder.open(path, comm) if is_folder else Checkpoint.open(path, comm) as source:
        on_root(comm, lambda: None if isinstance(source, Folder) else _check_whole(source))
        yield source


def fill_weights(source: Checkpoint | Folder, shards: Shards, pieces: Sequence[Piece]) -> None:
    """Fill pieces of weights and master weights in place, converted to their type. Collective over source's ranks.

    Raises HuggingFaceError, CheckpointError on all ranks.
    """
    if isinstance(source, Checkpoint):
        restore(source, shards, pieces)
    else:
        on_all(source.comm, lambda: _fill(source, shards, pieces))


def _check_whole(checkpoint: Checkpoint) -> None:
    base = facts(checkpoint)
    if base.base:
        raise ConfigError(
            f"{checkpoint.path} holds adapters alone, of the weights {base.config['run']['start_from']!r}; begin with "
            "those, or with what `hpcllm checkpoint convert` makes of both"
        )


def _source(config: Config) -> Path:
    """Path of the model: a run that has begun goes on also when its beginning is gone."""
    path = Path(config.run.start_from)
    newest = newest_first(Path(config.run.folder) / config.run.name / "checkpoints")
    return newest[0] if newest and not (fault_of(path) or path.exists()) else path


@torch.no_grad()
def _fill(folder: Folder, shards: Shards, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        for slab, out in shards.slabs(dataclasses.replace(piece, kind=MODEL)):
            out.copy_(as_tensor(folder.read(slab), folder.specs[slab.dataset].dtype))
