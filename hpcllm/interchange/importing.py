"""A folder of weights -> one of our checkpoints, at step 0 of a run that was never trained.

    all ranks   blocks of the file, shared by size --read--> (round) --> checkpoint.writer

Each rank brings whole blocks, so that no value travels between ranks, and at most a few of them are in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcllm.checkpoint.facts import RunFacts, attributes_of
from hpcllm.checkpoint.layout import TOKENIZER, DatasetSpec
from hpcllm.checkpoint.shares import my_blocks
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.config import DataConfig, ModelConfig, from_tables, to_tables
from hpcllm.interchange.contents import COMPANIONS, CONFIG
from hpcllm.interchange.dtype import cast
from hpcllm.interchange.folder import Folder
from hpcllm.together import place_in

if TYPE_CHECKING:
    from mpi4py import MPI

CARRIED = "interchange"  # group of the attributes that hold a folder's small files, as they were


def write_checkpoint(
    folder: Folder,
    path: Path,
    comm: MPI.Intracomm | None,
    dtype: str = "",
    advance: Callable[[int], None] = lambda _: None,
) -> WriteReport:
    """Write the folder's model as a checkpoint that `generate`, `inspect` and `run.start_from` read. Collective.

    dtype: of the tensors in the file; "": each keeps its own. advance: told the bytes that this rank has read, as it
    does. Raises InterchangeError, CheckpointError.
    """
    specs = {name: DatasetSpec(spec.shape, dtype or spec.dtype) for name, spec in folder.specs.items()}
    text = np.frombuffer(folder.tokenizer_json.encode(), dtype=np.uint8)
    if text.size:
        specs[TOKENIZER] = DatasetSpec(text.shape, "uint8")
    slabs = [specs[name].block(name, index) for name, index in my_blocks(specs, *place_in(comm))]

    def read(slab: Slab) -> np.ndarray:
        advance(slab.elements * specs[slab.dataset].item_bytes)
        if slab.dataset == TOKENIZER:
            return text[slab.start[0] : slab.start[0] + slab.shape[0]]
        return cast(folder.read(slab), folder.specs[slab.dataset].dtype, specs[slab.dataset].dtype, slab.dataset)

    carried = {f"{CARRIED}/{file}": folder.texts[file] for file in (CONFIG, *COMPANIONS) if file in folder.texts}
    return write(path, comm, prepare(comm, specs, slabs), read, attributes_of(never_trained(folder.model)) | carried)


def never_trained(model: ModelConfig) -> RunFacts:
    """What a checkpoint says of a model that no run of ours has made."""
    sequence = min(DataConfig().sequence_length, model.max_sequence)
    config = to_tables(from_tables({"model": dataclasses.asdict(model), "data": {"sequence_length": sequence}}))
    mesh = {"dp": 1, "pp": 1, "tp": 1}
    return RunFacts(step=0, position=0, seed=config["run"]["seed"], updates=0, config=config, mesh=mesh)
