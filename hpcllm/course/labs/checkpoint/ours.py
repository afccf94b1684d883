"""Our own functions, in the shape that a student writes: hpcllm.checkpoint's writer, to HDF5. What races run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.checkpoint import writer
from hpcllm.checkpoint.inspect import verify_file
from hpcllm.checkpoint.layout import Attribute, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.course.labs.checkpoint.states import path_of
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.partition import chunk_range

Values = NDArray[np.float32]
NAME = re.compile(r"step_(\d+)\.ckpt")


def own_range(n: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return this rank's range of n values."""
    return chunk_range(n, comm.size, comm.rank)


def place(length: int, comm: MPI.Intracomm) -> tuple[int, int]:
    """Return where this rank's part begins, and the length of the whole. Collective over comm."""
    lengths = comm.allgather(length)
    return sum(lengths[: comm.rank]), sum(lengths)


def save(comm: MPI.Intracomm, folder: Path, step: int, parts: Mapping[str, Values]) -> None:
    """Write a checkpoint. Collective over comm. Raises CheckpointError on all ranks."""
    plain = MPI.Intracomm(comm)
    arrays, specs = {}, {}
    for name, values in parts.items():
        start, n = place(values.size, plain)
        specs[name] = DatasetSpec((n,), "float32")
        if values.size:
            arrays[Slab(name, (start,), (values.size,))] = values
    plan = writer.prepare(plain, specs, list(arrays))
    facts: dict[str, Attribute] = {"lab/step": step, "lab/names": " ".join(parts)}
    writer.write(path_of(folder, step), plain, plan, arrays.__getitem__, facts)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole; None if there is none."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return next(
        (path for _, path in sorted(found, reverse=True) if verify_file(path, None, lambda _: None).is_sound), None
    )


def load(comm: MPI.Intracomm, folder: Path) -> tuple[int, dict[str, Values]]:
    """Return step and this rank's ranges. Collective over comm. Raises FileNotFoundError on all ranks."""
    plain = MPI.Intracomm(comm)
    path = on_root(plain, lambda: newest(folder))
    if path is None:
        raise FileNotFoundError(f"{folder} has no whole checkpoint")
    with Checkpoint.open(path, plain) as checkpoint:
        parts = {}
        for name in str(checkpoint.attributes["lab/names"]).split():
            start, end = own_range(checkpoint.specs[name].shape[0], plain)
            parts[name] = checkpoint.read(Slab(name, (start,), (end - start,)))
        return int(checkpoint.attributes["lab/step"]), parts


REFERENCE = SimpleNamespace(own_range=own_range, place=place, save=save, newest=newest, load=load)
