"""A checkpoint back into a run, or into a model alone. Starts no MPI: `generate` works where only a login node is.

    asked for              taken from the file
    model, in fp32         /optimizer/master if there is one: more of it is known there; else /model
    model, in 16 bit       /model if it is of that type, else as above, rounded
    master                 /optimizer/master, else /model
    moments                /optimizer/exp_avg, /optimizer/exp_avg_sq

Any layout reads what any other wrote: a rank asks for the ranges that it has, as slabs of global tensors, and gets
those; see fetch.py. Where the stored type is the one asked for, a value goes from the file to its place, at most by way
of a message. What is in the file: state.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from hpcllm.checkpoint.facts import RunFacts, facts
from hpcllm.checkpoint.layout import MASTER, MODEL, TOKENIZER
from hpcllm.checkpoint.pieces import Shape, Shards
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.tensors import fill
from hpcllm.errors import CheckpointError
from hpcllm.optim.pieces import Piece
from hpcllm.together import raise_together


def restore(checkpoint: Checkpoint, shards: Shards, pieces: Sequence[Piece]) -> RunFacts:
    """Fill the pieces of this rank in place. Collective over checkpoint.comm.

    The file must have the tensors of shards.shapes, the whole model, no more and no others, of each kind that is asked
    for: so a rank that holds one stage still notices a tensor too many. Values are converted to the type of the piece;
    where that is the stored type, to the bit. Raises CheckpointError on all ranks, listing the first three differences
    or what is damaged.
    """
    error = None
    wanted: list[tuple[Slab, Tensor]] = []
    try:
        keeps_master = any(piece.kind == MASTER for piece in pieces)
        stored = [dataclasses.replace(piece, kind=_source(checkpoint, piece, keeps_master)) for piece in pieces]
        for kind in sorted({piece.kind for piece in stored}):
            check_names(checkpoint, kind, shards.shapes)
        wanted = [pair for piece in stored for pair in shards.slabs(piece)]
        known = facts(checkpoint)
    except CheckpointError as fault:
        error = fault
    raise_together(checkpoint.comm, error)
    fill(checkpoint, wanted)
    return known


def read_model(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], tensors: Mapping[str, tuple[Shape, Tensor]]
) -> None:
    """Fill parameters in place, each a box of the global tensor of its name. Collective over checkpoint.comm.

    shapes: name -> global shape, of the whole model. tensors: name -> where the box begins, and its memory. Values are
    converted to the type of the tensor. Raises CheckpointError on all ranks, as `restore`.
    """
    error = None
    try:
        check_names(checkpoint, MODEL, shapes)
    except CheckpointError as fault:
        error = fault
    raise_together(checkpoint.comm, error)
    boxes = {name: Slab(f"{MODEL}/{name}", start, tuple(tensor.shape)) for name, (start, tensor) in tensors.items()}
    fill(checkpoint, [(boxes[name], tensor) for name, (_, tensor) in tensors.items()])


def tokenizer_json(checkpoint: Checkpoint) -> str:
    """The tokenizer of the run as JSON; empty if it had none. Not collective. Raises CheckpointError."""
    if TOKENIZER not in checkpoint.datasets:
        return ""
    try:
        return checkpoint.read_whole(TOKENIZER).tobytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{checkpoint.path}: /{TOKENIZER} is not text: {error}") from error


def _source(checkpoint: Checkpoint, piece: Piece, keeps_master: bool) -> str:
    """The kind of tensor that a piece is filled from; see the module's text."""
    if piece.kind not in (MODEL, MASTER) or f"{MASTER}/{piece.name}" not in checkpoint.datasets:
        return MODEL if piece.kind == MASTER else piece.kind
    model = checkpoint.datasets.get(f"{MODEL}/{piece.name}")
    is_exact = model is not None and f"torch.{model.spec.dtype}" == str(piece.values.dtype)
    return MODEL if piece.kind == MODEL and keeps_master and is_exact else MASTER


def check_names(checkpoint: Checkpoint, kind: str, shapes: Mapping[str, Shape]) -> None:
    """The file has the model's tensors of a kind, no more and no others."""
    wanted = {f"{kind}/{name}": shape for name, shape in shapes.items()}
    stored = {key: item.spec.shape for key, item in checkpoint.datasets.items() if key.startswith(f"{kind}/")}
    faults = [f"{key} is missing" for key in wanted if key not in stored]
    faults += [f"{key} is not of this model" for key in stored if key not in wanted]
    both = {key: shape for key, shape in wanted.items() if key in stored}
    faults += [f"{key} has shape {stored[key]}, not {shape}" for key, shape in both.items() if stored[key] != shape]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(faults[:3])}{more}")
