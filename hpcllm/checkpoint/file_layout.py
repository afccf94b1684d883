"""HDF5 file of a checkpoint without its tensors: created before they are written, finished and renamed after.

    create   room for the header | HDF5 tables | dataset: allocated, unwritten | dataset | ..     --> offset of each
    finish   checksums of all blocks, attributes, `complete`, the header, fsync, rename, fsync of the folder

By one process; `allocate_datasets` also by all ranks at once with a parallel HDF5. Whatever stops a writer before the
rename, the previous file of that name is still there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcllm.checkpoint.header import Index, write_header
from hpcllm.checkpoint.layout import CHECKSUMS, COMPLETE, DTYPE_ATTRIBUTE, PACKED, STORED_AS, DatasetSpec
from hpcllm.errors import CheckpointError
from hpcllm.mpi.collective_errors import on_root, rank_and_size
from hpcllm.system.raw_files import allocate, disk_errors, sync

if TYPE_CHECKING:
    from mpi4py import MPI

_LIBVER = ("v108", "v110")  # tools built on HDF5 1.10 open it
_ALIGN_BYTES = 4096  # larger datasets begin a page; to align the small ones too costs HDF5 quadratic time
_TABLE_BYTES = 8192  # at most so much a dataset for alignment, HDF5 tables, checksums and index
_HEADROOM_BYTES = 1 << 20  # for attributes
_LFS_LIMIT_S = 60.0


@contextlib.contextmanager
def temporary_path(path: Path, comm: MPI.Intracomm | None) -> Iterator[Path]:
    """A name beside `path` under which it is made until it is whole, the same on all ranks; removed if that fails.

    Beside the target, so that the rename stays on one file system; host and process tell if it is stale. May become a
    file or a folder. Collective over comm.
    """
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = on_root(comm, lambda: path.with_name(f"{path.name}.tmp-{mark}"))
    try:
        yield temporary
    except BaseException:
        if rank_and_size(comm)[0] == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary, ignore_errors=True) if temporary.is_dir() else temporary.unlink()
        raise


def set_stripes(path: Path, stripe_count: int, stripe_mib: int) -> str:
    """Create `path`, empty, spread over stripe_count Lustre targets (-1: all); HDF5 then fills it. For one rank.

    Returns "", or why it was not done: where there is no `lfs`, or the folder is not on Lustre, the file is written all
    the same.
    """
    setting = f"checkpoint.stripe_count = {stripe_count}"
    lfs = shutil.which("lfs")
    if not lfs:
        return f"{setting} has no effect: there is no `lfs` on PATH, so {str(path.parent)!r} is not taken for Lustre"
    command = [lfs, "setstripe", "-c", str(stripe_count), "-S", f"{stripe_mib}M", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LFS_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{setting} has no effect: {' '.join(command)}: {error}"
    if done.returncode:
        return f"{setting} has no effect: {' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
    return ""


def check_space(folder: Path, specs: Mapping[str, DatasetSpec]) -> None:
    """Raises CheckpointError if the checkpoint cannot fit, OSError if that cannot be known."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    needed = sum(spec.bytes for spec in specs.values()) + _TABLE_BYTES * len(specs) + _HEADROOM_BYTES
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free, but the checkpoint needs {needed:,} with its tables; make room there"
        )


def create(temporary: Path, header_bytes: int, **options: Any) -> h5py.File:
    """Create a file that is empty but for the room for its header. options: of h5py.File."""
    if "driver" not in options:
        options["locking"] = False  # the name is ours alone, and parallel file systems often reject locks
    return h5py.File(temporary, "w", libver=_LIBVER, userblock_size=header_bytes, **options)


def allocate_datasets(
    temporary: Path, specs: Mapping[str, DatasetSpec], header_bytes: int, **driver: Any
) -> dict[str, int]:
    """Create the file with all datasets, unwritten, over an empty one if there is one.

    Returns dataset -> byte offset in the file. driver: options of h5py.File for one; with driver="mpio" collective over
    its comm. Raises OSError, ValueError or RuntimeError, as the library does.
    """
    alignment = {"alignment_threshold": _ALIGN_BYTES, "alignment_interval": _ALIGN_BYTES}
    offsets = {}
    with create(temporary, header_bytes, **alignment, **driver) as file:
        for name, spec in sorted(specs.items()):
            offsets[name] = allocate(file, name, spec.shape, STORED_AS[spec.dtype])
            set_dtype(file, name, spec)
    return offsets


def set_dtype(file: h5py.File, name: str, spec: DatasetSpec) -> None:
    """Name the element type in an attribute of a dataset whose type HDF5 does not have."""
    if spec.dtype == "bfloat16":
        file[name].attrs[DTYPE_ATTRIBUTE] = spec.dtype


def finish(
    temporary: Path,
    path: Path,
    index: Index,
    header_bytes: int,
    checksums: np.ndarray,
    packed: np.ndarray | None = None,
) -> None:
    """Add tables and attributes to a file that has all its data, write its header, and rename it to `path`.

    index: with the offsets of the datasets. checksums: uint64, of all blocks in the order of layout.checksum_ranges.
    packed: (blocks, 3) uint64, of an archive, whose datasets are chunked and have no offsets. Raises CheckpointError.
    """
    tables = {CHECKSUMS: checksums} if packed is None else {CHECKSUMS: checksums, PACKED: packed}
    offsets = {}
    with disk_errors(CheckpointError, f"cannot finish {path}"):
        with h5py.File(temporary, "r+", libver=_LIBVER, locking=False) as file:
            for name, table in tables.items():
                dataset = file.create_dataset(name, data=table.astype("<u8"), track_times=False)
                offsets[name] = int(dataset.id.get_offset() or 0)
            for key, value in index.attributes.items():
                group, _, name = key.rpartition("/")
                (file.require_group(group) if group else file).attrs[name] = value
            file.attrs[COMPLETE] = True
        write_header(temporary, dataclasses.replace(index, tables=offsets), header_bytes, packed)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
