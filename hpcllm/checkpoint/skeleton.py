"""A checkpoint without its tensors: made before they are written, finished and given its name after.

    make     room for the front | header | dataset: allocated, unwritten | dataset | ..     --> where each one begins
    finish   checksums of all blocks, attributes, `complete`, the front, fsync, rename, fsync of the folder

By one process; `make` also by all at once with a parallel HDF5. Whatever stops a writer before the rename, the file
that had the name before is still there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcllm.checkpoint import guard
from hpcllm.checkpoint.index import Index
from hpcllm.checkpoint.layout import CHECKSUMS, COMPLETE, DTYPE_ATTRIBUTE, PACKED, STORED_AS, DatasetSpec
from hpcllm.errors import CheckpointError
from hpcllm.raw_hdf5 import allocate, sync
from hpcllm.together import on_root, place_in

if TYPE_CHECKING:
    from mpi4py import MPI

_LIBVER = ("v108", "v110")  # tools built on HDF5 1.10 open it
_ALIGN_BYTES = 4096  # what is as large begins a page; to align the small ones too costs HDF5 quadratic time
_TABLE_BYTES = 8192  # at most so much a dataset for alignment, header, checksums and guard
_HEADROOM_BYTES = 1 << 20  # for attributes


@contextlib.contextmanager
def aside(path: Path, comm: MPI.Intracomm | None) -> Iterator[Path]:
    """The name under which `path` is made until it is whole, the same on all ranks; the file goes if that fails.

    Beside the target, so that the rename stays on one file system; host and process tell whether it is stale.
    Collective over comm.
    """
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = on_root(comm, lambda: path.with_name(f"{path.name}.tmp-{mark}"))
    try:
        yield temporary
    except BaseException:
        if place_in(comm)[0] == 0:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def make(temporary: Path, specs: Mapping[str, DatasetSpec], front: int, **driver: Any) -> dict[str, int]:
    """Make the file, over an empty one if there is one. Returns dataset -> byte offset in the file.

    front: bytes to leave for it, as guard.front_bytes says. driver: what h5py.File takes for one; with driver="mpio"
    collective over its comm. Raises OSError, ValueError or RuntimeError, as the library does.
    """
    with create(temporary, front, alignment_threshold=_ALIGN_BYTES, alignment_interval=_ALIGN_BYTES, **driver) as file:
        return {name: _allocate(file, name, specs[name]) for name in sorted(specs)}


def create(temporary: Path, front: int, **options: Any) -> h5py.File:
    """An empty file but for the room for its front. options: of h5py.File."""
    if "driver" not in options:
        options["locking"] = False  # the name is ours alone, and parallel file systems often refuse locks
    return h5py.File(temporary, "w", libver=_LIBVER, userblock_size=front, **options)


def check_space(folder: Path, specs: Mapping[str, DatasetSpec]) -> None:
    """Raises CheckpointError if the checkpoint cannot fit, OSError if that cannot be known."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    needed = sum(spec.bytes for spec in specs.values()) + _TABLE_BYTES * len(specs) + _HEADROOM_BYTES
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free, but the checkpoint needs {needed:,} with its tables; make room there"
        )


def finish(
    temporary: Path, path: Path, index: Index, front: int, checksums: np.ndarray, packed: np.ndarray | None = None
) -> None:
    """Add what only a whole file has, seal it, and give it its name. Raises CheckpointError.

    index: with the offsets of the datasets. checksums: uint64, of all blocks in the order of layout.checksum_ranges.
    packed: (blocks, 3) uint64, of an archive, whose datasets are chunked and have no offsets.
    """
    tables = {CHECKSUMS: checksums} if packed is None else {CHECKSUMS: checksums, PACKED: packed}
    try:
        with h5py.File(temporary, "r+", libver=_LIBVER, locking=False) as file:
            places = {name: _add_table(file, name, table) for name, table in tables.items()}
            for key, value in index.attributes.items():
                group, _, name = key.rpartition("/")
                (file.require_group(group) if group else file).attrs[name] = value
            file.attrs[COMPLETE] = True
        guard.seal(temporary, dataclasses.replace(index, tables=places), front, packed)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"cannot finish {path}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What went wrong, in the words of the operating system where it has some; HDF5 hides its number in a text."""
    if number := re.search(r"errno = (\d+)", str(error)):
        return os.strerror(int(number[1]))
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _add_table(file: h5py.File, name: str, table: np.ndarray) -> int:
    dataset = file.create_dataset(name, data=table.astype("<u8"), track_times=False)
    return int(dataset.id.get_offset() or 0)


def _allocate(file: h5py.File, name: str, spec: DatasetSpec) -> int:
    offset = allocate(file, name, spec.shape, STORED_AS[spec.dtype])
    say_dtype(file, name, spec)
    return offset


def say_dtype(file: h5py.File, name: str, spec: DatasetSpec) -> None:
    """On a dataset whose type HDF5 does not have."""
    if spec.dtype == "bfloat16":
        file[name].attrs[DTYPE_ATTRIBUTE] = spec.dtype
