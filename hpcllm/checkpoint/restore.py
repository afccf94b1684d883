"""Read a checkpoint back into a run, or into a model alone. Starts no MPI: `generate` also works on a login node.

    wanted                 taken from the file
    model, in fp32         /optimizer/master if there is one: more of it is known there; else /model
    model, in 16 bit       /model if it is of that type, else as above, rounded
    master                 /optimizer/master, else /model
    moments                /optimizer/exp_avg, /optimizer/exp_avg_sq

Any layout reads what any other wrote: a rank wants slabs of global tensors, and all ranks read together. Each block
that anyone wants is read and verified once, by its owner (plan.py, as in writing), and travels to all in need:

    wanted     rank 0: columns 0-2 of w      plan: block 0 -> rank 0, block 1 -> rank 1
               rank 1: columns 3-5 of w
    rank 0     pread block 0, XXH3 --+---> own columns          so the file system sees each byte once, in large
    rank 1     pread block 1, XXH3 --+---> the other's columns  requests, whatever the split and however many replicas

    stored float32, wanted float32     file --> tensor
    stored float32, wanted bfloat16    file --> scratch, float32 --> tensor      in rounds that bound the scratch memory

A round is some of the file's datasets, the same on all ranks, so a block is still read once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcllm.checkpoint.agreement import make_plan
from hpcllm.checkpoint.exchange import from_owners
from hpcllm.checkpoint.layout import MASTER, MODEL, STORED_AS, TOKENIZER
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import FEEDBACK, FEEDBACK_LAYOUT, Residuals, RunFacts, Shape, Shards, as_tensor, facts
from hpcllm.errors import CheckpointError
from hpcllm.mpi.collective_errors import on_all, raise_if_any_failed
from hpcllm.optim.flat_buffers import Piece

Wanted = Sequence[tuple[Slab, Tensor]]

_SCRATCH_BYTES = 1 << 28  # or a dataset's, where that is more


def restore(checkpoint: Checkpoint, shards: Shards, pieces: Sequence[Piece]) -> RunFacts:
    """Fill the pieces of this rank in place. Collective over checkpoint.comm.

    The file must have the tensors of shards.shapes, the whole model, no more and no others, of each kind that is
    wanted: so a rank that holds one stage still notices a tensor too many. Values are converted to the type of the
    piece; where that is the stored type, to the bit. Raises CheckpointError on all ranks, listing the first three
    differences or what is damaged.
    """

    def look() -> tuple[RunFacts, list[tuple[Slab, Tensor]]]:
        keeps_master = any(piece.kind == MASTER for piece in pieces)
        stored = [dataclasses.replace(piece, kind=_source(checkpoint, piece, keeps_master)) for piece in pieces]
        for kind in sorted({piece.kind for piece in stored}):
            check_names(checkpoint, kind, shards.shapes)
        return facts(checkpoint), [pair for piece in stored for pair in shards.slabs(piece)]

    known, wanted = on_all(checkpoint.comm, look)
    fill(checkpoint, wanted)
    return known


def restore_residuals(checkpoint: Checkpoint, residuals: Residuals) -> str:
    """Fill this rank's residuals from the file. Collective over checkpoint.comm.

    Returns "", or why they could not be restored; they are zero then, whatever a damaged file has left there before.
    Raises CheckpointError if the file is damaged.
    """
    for array in residuals.arrays:
        array.zero_()
    stored = checkpoint.datasets.get(FEEDBACK)
    if stored is None:
        return "the checkpoint has none"
    if checkpoint.attributes.get(FEEDBACK_LAYOUT) != residuals.layout or stored.spec != residuals.specs()[FEEDBACK]:
        return "the checkpoint's is of another layout, codec or bucket size"
    fill(checkpoint, list(residuals.slabs().items()))
    return ""


def read_model(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], tensors: Mapping[str, tuple[Shape, Tensor]]
) -> None:
    """Fill parameters in place, each a box of the global tensor of its name. Collective over checkpoint.comm.

    shapes: name -> global shape, of the whole model. tensors: name -> where the box begins, and its memory. Values are
    converted to the type of the tensor. Raises CheckpointError on all ranks, as `restore`.
    """
    on_all(checkpoint.comm, lambda: check_names(checkpoint, MODEL, shapes))
    boxes = [(Slab(f"{MODEL}/{name}", start, tuple(out.shape)), out) for name, (start, out) in tensors.items()]
    fill(checkpoint, boxes)


def tokenizer_json(checkpoint: Checkpoint) -> str:
    """The tokenizer of the run as JSON; empty if it had none. Not collective. Raises CheckpointError."""
    if TOKENIZER not in checkpoint.datasets:
        return ""
    try:
        return checkpoint.read_whole(TOKENIZER).tobytes().decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{checkpoint.path}: /{TOKENIZER} is not text: {error}") from error


def check_names(checkpoint: Checkpoint, kind: str, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless the file has the model's tensors of a kind, no more and no others."""
    wanted = {f"{kind}/{name}": shape for name, shape in shapes.items()}
    stored = {key: item.spec.shape for key, item in checkpoint.datasets.items() if key.startswith(f"{kind}/")}
    faults = [f"{key} is missing" for key in wanted if key not in stored]
    faults += [f"{key} is not of this model" for key in stored if key not in wanted]
    both = {key: shape for key, shape in wanted.items() if key in stored}
    faults += [f"{key} has shape {stored[key]}, not {shape}" for key, shape in both.items() if stored[key] != shape]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(faults[:3])}{more}")


def fill(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Fill this rank's tensors, each of a slab's shape, with its values. Collective over checkpoint.comm.

    Values are converted to the type of the tensor; where that is the stored type, to the bit. Raises CheckpointError on
    all ranks, as `fetch`.
    """
    specs = on_all(checkpoint.comm, lambda: [checkpoint.stored(slab).spec for slab, _ in wanted])
    scratch_bytes = sum(
        slab.elements * spec.item_bytes
        for (slab, tensor), spec in zip(wanted, specs, strict=True)
        if _memory(tensor, spec.dtype) is None
    )
    for names in _rounds(checkpoint, -(-_max_over_ranks(checkpoint, scratch_bytes) // _SCRATCH_BYTES)):
        _fill_at_once(checkpoint, [(slab, tensor) for slab, tensor in wanted if slab.dataset in names])


def fetch(checkpoint: Checkpoint, wanted: Sequence[tuple[Slab, np.ndarray]]) -> None:
    """Fill arrays with the slabs of this rank. Collective over checkpoint.comm.

    wanted: C-contiguous arrays in the slab's shape and the stored type (bfloat16 as uint16), which are filled without a
    copy but the one from the file; slabs may share elements, or be the same. Raises CheckpointError on all ranks,
    naming what is damaged and who read it, or a slab that the file does not have; the arrays then hold anything.
    """

    def check() -> None:
        for slab, array in wanted:
            stored = STORED_AS[checkpoint.stored(slab).spec.dtype]
            if array.shape != slab.shape or array.dtype != stored or not array.flags.c_contiguous:
                raise CheckpointError(f"{slab} is stored as {stored}; it cannot be read to {array.dtype} {array.shape}")

    on_all(checkpoint.comm, check)
    arrays = dict(reversed(wanted))
    specs = {slab.dataset: checkpoint.datasets[slab.dataset].spec for slab in arrays}
    plan = make_plan(checkpoint.comm, specs, list(arrays), exactly_once=False)
    error = None
    try:
        from_owners(plan, checkpoint.comm, checkpoint.fill_block, arrays.__getitem__)
    except CheckpointError as fault:
        error = fault
    raise_if_any_failed(checkpoint.comm, error)
    for slab, array in wanted:
        if array is not arrays[slab]:
            array[...] = arrays[slab]


def _source(checkpoint: Checkpoint, piece: Piece, keeps_master: bool) -> str:
    """The kind of tensor that a piece is filled from; see the module's text."""
    if piece.kind not in (MODEL, MASTER) or f"{MASTER}/{piece.name}" not in checkpoint.datasets:
        return MODEL if piece.kind == MASTER else piece.kind
    model = checkpoint.datasets.get(f"{MODEL}/{piece.name}")
    is_exact = model is not None and f"torch.{model.spec.dtype}" == str(piece.values.dtype)
    return MODEL if piece.kind == MODEL and keeps_master and is_exact else MASTER


def _max_over_ranks(checkpoint: Checkpoint, here: int) -> int:
    """The largest of a number on all ranks. Collective over checkpoint.comm."""
    if checkpoint.comm is None:
        return here
    from mpi4py import MPI

    most: int = checkpoint.comm.allreduce(here, MPI.MAX)
    return most


def _rounds(checkpoint: Checkpoint, rounds: int) -> Iterator[frozenset[str]]:
    """The names of the datasets of each round, of about as many bytes each."""
    sizes = {name: stored.spec.bytes for name, stored in checkpoint.datasets.items()}
    each = -(-sum(sizes.values()) // max(rounds, 1)) or 1
    ends = itertools.accumulate(sizes.values())
    for _, group in itertools.groupby(zip(sizes, ends, strict=True), key=lambda named: (named[1] - 1) // each):
        yield frozenset(name for name, _ in group)


@torch.no_grad()
def _fill_at_once(checkpoint: Checkpoint, wanted: Wanted) -> None:
    arrays, converted = [], []
    for slab, tensor in wanted:
        dtype = checkpoint.stored(slab).spec.dtype
        array = _memory(tensor, dtype)
        if array is None:
            array = np.empty(slab.shape, STORED_AS[dtype])
            converted.append((tensor, array, dtype))
        arrays.append((slab, array))
    fetch(checkpoint, arrays)
    for tensor, array, dtype in converted:
        tensor.copy_(as_tensor(array, dtype))


def _memory(tensor: Tensor, dtype: str) -> np.ndarray | None:
    """The tensor's memory as an array of the stored type `dtype`; None if it is of another, strided or on a device."""
    if str(tensor.dtype) != f"torch.{dtype}" or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    values = tensor.detach()
    return (values.view(torch.uint16) if dtype == "bfloat16" else values).numpy()
