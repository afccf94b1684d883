"""The frozen base of a run with low-rank adapters: read once at each start, and known again by its content.

    run.start_from, a folder or a checkpoint --> each rank its part of the frozen weights
            blocks of model/<parameter> --XXH3 each--> fingerprint --> run/base in every checkpoint of the run

A checkpoint of such a run holds adapters and their optimizer states alone, so it means something only with its base,
which may have moved meanwhile but not changed. The fingerprint is of the stored values, block by block as a checkpoint
has them: a folder and the checkpoint that `convert` made of it have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.huggingface.folder import Folder
from hpcllm.checkpoint.huggingface.start import fill_weights, open_weights
from hpcllm.checkpoint.layout import MASTER, MODEL, Block, as_bytes, blocks_of, checksum, my_blocks
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.checkpoint.state import Shards
from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.errors import ConfigError
from hpcllm.model.quantised import QuantisedWeight
from hpcllm.mpi.collective_errors import on_all, on_root, rank_and_size
from hpcllm.optim.flat_buffers import Piece

if TYPE_CHECKING:
    from mpi4py import MPI


def read_base(
    path: Path,
    frozen: Mapping[str, Tensor],
    quantised: Mapping[str, QuantisedWeight],
    shards: Shards,
    comm: MPI.Intracomm,
) -> str:
    """Fill this rank's frozen weights in place, by their names; returns the fingerprint. Collective over comm.

    path: of a Hugging Face folder or a checkpoint with whole weights. shards: shapes of all its parameters. Values are
    converted to the type of the tensor; those to be quantised are read one by one, in float32. Raises ConfigError,
    HuggingFaceError, CheckpointError on all ranks.
    """
    on_root(comm, lambda: check_there(path))
    with open_weights(path, comm) as source:
        fill_weights(source, shards, [_piece(name, tensor) for name, tensor in frozen.items()])
        waiting = list(quantised.items())
        while comm.allreduce(len(waiting)):  # a rank that is done still reads blocks for others
            name, weight = waiting.pop() if waiting else ("", None)
            values = torch.empty(weight.shape if weight else (0,))
            fill_weights(source, shards, [_piece(name, values)] if weight else [])
            if weight:
                weight.set(values.to(weight.data.device))
        return fingerprint(source, comm)


def _piece(name: str, tensor: Tensor) -> Piece:
    return Piece(MODEL, name, 0, tensor.numel(), tensor.view(-1))


def check_base(found: str, expected: str, path: Path, named: str) -> None:
    """Raise ConfigError unless the base has the fingerprint that the checkpoint at `path` was trained on.

    named: run.start_from.
    """
    if found != expected:
        raise ConfigError(
            f"{path} holds adapters of weights with the fingerprint {expected}, but run.start_from = {named!r} holds "
            f"others, with {found}; name the weights that the run began with"
        )


def fingerprint(source: Checkpoint | Folder, comm: MPI.Intracomm | None) -> str:
    """Return 16 hexadecimal digits that follow from names, shapes, types and values of the weights.

    Collective over comm, whose ranks share the reading of a folder; a checkpoint has the checksums of its blocks.
    """
    specs = {name: spec for name, spec in source.specs.items() if name.startswith((f"{MODEL}/", f"{MASTER}/"))}
    described = repr([(name, spec.shape, spec.dtype) for name, spec in sorted(specs.items())])
    if isinstance(source, Checkpoint):
        sums = np.concatenate([source.datasets[name].checksums for name in sorted(specs)])
    else:
        sums = _checksums(source, comm)
    return f"{checksum(described.encode() + np.ascontiguousarray(sums, '<u8').tobytes()):016x}"


def _checksums(folder: Folder, comm: MPI.Intracomm | None) -> np.ndarray:
    """Return the XXH3 of each block of a folder's tensors, in the order of a checkpoint. Collective over comm."""
    rank, ranks = rank_and_size(comm)

    def of_block(block: Block) -> int:
        name, index = block
        return checksum(as_bytes(folder.read(folder.specs[name].block(name, index))))

    mine = on_all(comm, lambda: list(map_ahead(of_block, my_blocks(folder.specs, rank, ranks), ranks)))
    sums = np.array([each for part in (comm.allgather(mine) if comm else [mine]) for each in part], dtype="<u8")
    assert len(sums) == len(blocks_of(folder.specs)), "each block has one owner"
    return sums


def check_there(path: Path) -> None:
    """Raise ConfigError if there is nothing at the path of a base."""
    if fault_of(path) or not path.exists():
        raise ConfigError(
            f"the base {shown(str(path))} is not there, and adapters mean nothing without it; valid: the path of the "
            "weights that they were trained on, wherever those lie now (run.start_from, or --base)"
        )
