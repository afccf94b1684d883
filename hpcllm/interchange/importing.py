"""A folder of weights -> one of our checkpoints, at step 0 of a run that was never trained.

    all ranks   pieces of parameters, shared by size --read--> (round) --write--> the file that checkpoint.writer made

At most two pieces of a rank are in memory at a time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcllm.checkpoint.layout import TOKENIZER, DatasetSpec
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.checkpoint.state import RunState, attributes
from hpcllm.checkpoint.writer import WriteReport, write_as_read
from hpcllm.config import DataConfig, ModelConfig, from_tables, to_tables
from hpcllm.interchange.contents import COMPANIONS, CONFIG
from hpcllm.interchange.dtype import cast
from hpcllm.interchange.folder import Folder
from hpcllm.interchange.places import my_pieces

CARRIED = "interchange"  # group of the attributes that hold a folder's small files, as they were


def write_checkpoint(folder: Folder, path: Path, comm: MPI.Intracomm, dtype: str = "") -> WriteReport:
    """Write the folder's model as a checkpoint that `generate`, `inspect` and `run.start_from` read. Collective.

    dtype: of the tensors in the file; "": each keeps its own. Raises InterchangeError, CheckpointError.
    """
    specs = {name: DatasetSpec(spec.shape, dtype or spec.dtype) for name, spec in folder.specs.items()}
    slabs = my_pieces(specs, comm.rank, comm.size)
    text = np.frombuffer(folder.tokenizer_json.encode(), dtype=np.uint8)
    if comm.rank == 0 and text.size:
        specs[TOKENIZER] = DatasetSpec(text.shape, "uint8")
        slabs.append(whole(TOKENIZER, text.shape))

    def read(slab: Slab) -> np.ndarray:
        if slab.dataset == TOKENIZER:
            return text
        return cast(folder.read(slab), folder.specs[slab.dataset].dtype, specs[slab.dataset].dtype, slab.dataset)

    carried = {f"{CARRIED}/{file}": folder.texts[file] for file in (CONFIG, *COMPANIONS) if file in folder.texts}
    return write_as_read(path, comm, specs, slabs, read, attributes(never_trained(folder.model)) | carried)


def never_trained(model: ModelConfig) -> RunState:
    """What a checkpoint says of a model that no run of ours has made, its tensors aside."""
    sequence = min(DataConfig().sequence_length, model.max_sequence)
    return RunState(
        step=0,
        updates=0,
        position=0,
        config=to_tables(from_tables({"model": dataclasses.asdict(model), "data": {"sequence_length": sequence}})),
        pieces=(),
        shards=Shards({}),
        owned=frozenset(),
        tokenizer_json="",
        mesh={"dp": 1, "pp": 1, "tp": 1},
    )
