"""HDF5 datasets that any process can fill with plain writes, without a parallel HDF5.

    one process   allocate: contiguous, on disk from the start, never filled with zeros  -->  byte offset of the dataset
    all           write_at: their own part, at offset + where it begins in the dataset
    who is last   sync the file, rename it, sync its folder

Token store and checkpoint are both made of such datasets. `disk_errors` names what the disk or HDF5 rejects. Who only
reads a checkpoint uses `read_at`, and never loads HDF5.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.errors import ConfigError, HpcllmError

if TYPE_CHECKING:
    import h5py
    import numpy as np

_REQUEST_BYTES = 1 << 23  # several MiB a call keep the file system busy; Linux cuts calls at 2 GiB


def allocate(file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Make a dataset, the groups above it too, and leave its bytes unwritten. Returns its offset; 0 if it is empty."""
    import h5py  # not where checkpoints are read

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return int(make_dataset(file, name, shape, dtype, creation).get_offset() or 0)


def make_dataset(
    file: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], creation: h5py.h5p.PropDCID
) -> h5py.h5d.DatasetID:
    """Make a dataset of any kind, the groups above it too."""
    import h5py  # not where checkpoints are read

    creation.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    return h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, creation, lcpl=links)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` from byte `offset` of the file on. Raises OSError."""
    rest = memoryview(data)
    while rest:  # a signal, a nearly full disk or the file system may cut a write short
        written = os.pwrite(descriptor, rest[:_REQUEST_BYTES], offset)
        rest, offset = rest[written:], offset + written


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out`, bytes, from byte `offset` of the file on; returns how many there were. Raises OSError."""
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done : done + _REQUEST_BYTES]], offset + done)
        if count == 0:
            break
        done += count
    return done


def sync(path: Path) -> None:
    """Put a file on disk, or a folder: a rename is on disk only after its folder is. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(kind: type[HpcllmError], what: str) -> Iterator[None]:
    """Raise an error of the operating system or of HDF5 as one of ours: 'cannot write /a/b.h5: No space left'."""
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise kind(f"{what}: {_reason(error)}") from error


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise an OSError of the block as a ConfigError, for a file that a user named: '... cannot be written: why'."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be written: {error.strerror or error}") from error


def _reason(error: Exception) -> str:
    """The cause in the operating system's words where it has some; HDF5 hides errno in a text."""
    if number := re.search(r"errno = (\d+)", str(error)):
        return os.strerror(int(number[1]))
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
