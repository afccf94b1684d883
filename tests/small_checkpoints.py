"""Checkpoints as tests want them: written in one call, verified in one; and with a front that lies, rightly sealed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from mpi4py import MPI

from hpcllm.checkpoint.inspect import find_damage
from hpcllm.checkpoint.layout import Attribute, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.errors import CheckpointError


def write_slabs(
    path: Path,
    comm: MPI.Intracomm | None,
    specs: Mapping[str, DatasetSpec],
    slabs: Mapping[Slab, np.ndarray],
    attributes: Mapping[str, Attribute],
) -> WriteReport:
    """prepare, then write. Collective over comm."""
    return write(path, comm, prepare(comm, specs, list(slabs)), slabs.__getitem__, attributes)


def verify(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError on all ranks, naming the first damaged block. Collective over checkpoint.comm."""
    if damage := find_damage(checkpoint):
        raise CheckpointError(f"{checkpoint.path}: {damage[0].reason}")


def own_attributes(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Without what the writer says of itself."""
    return {key: value for key, value in attributes.items() if not key.startswith("written/")}


def seal_as(path: Path, text: bytes, extents: Iterable[tuple[int, int]], front: int = 4096) -> None:
    """Give a file a front with this text as its index, and a right checksum, as someone would who means harm.

    extents: (offset, bytes) of what the checksum shall not cover; those outside the file or one another are left out.
    """
    with path.open("r+b") as file:
        head_bytes = len(b"hpcllm file 3: index of 00000000 bytes, xxh3 0123456789abcdef\n")
        body = text.ljust(front - head_bytes, b"\0")
        data, place = file.read(), front
        covered = xxhash.xxh3_64(body)
        for offset, length in sorted(extents):
            if place <= offset <= offset + length <= len(data):
                covered.update(data[place:offset])
                place = offset + length
        covered.update(data[place:])
        file.seek(0)
        file.write(b"hpcllm file 3: index of %08d bytes, xxh3 %016x\n" % (front, covered.intdigest()) + body)


def index_of(path: Path) -> dict[str, Any]:
    """The index of a file, as JSON has it."""
    index: dict[str, Any] = json.loads(path.read_bytes()[:4096].split(b"\n", 1)[1].rstrip(b"\0"))
    return index


def stored_tensors(path: Path) -> dict[str, bytes]:
    """Bytes of all tensors of model and optimizer in a checkpoint, by name."""
    found: dict[str, bytes] = {}
    with h5py.File(path) as file:
        for group in ("model", "optimizer"):
            file[group].visititems(
                lambda name, item, group=group: (
                    found.update({f"{group}/{name}": item[()].tobytes()}) if isinstance(item, h5py.Dataset) else None
                )
            )
    assert found
    return found
