"""One HDF5 file written by all ranks at once, with the h5py that pip installs.

    rank 0   merge specs, create the file ---+                        +--- checksums, attributes, guard -- rename
             (every dataset has its bytes,   | offsets                | crc32
              none is written yet)           v                        ^
    all      ............................... pwrite my slabs, crc32, fsync

HDF5 can allocate a contiguous dataset early, never fill it, and tell where it lies; so ranks write raw bytes there
with no parallel HDF5, no MPI-IO and no lock. The file has a temporary name until it is whole and on disk: whatever
happens before the rename, the previous file of that name is still there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

from hpcllm.checkpoint import guard
from hpcllm.checkpoint.layout import (
    CHECKSUMS,
    COMPLETE,
    DTYPE_ATTRIBUTE,
    STORED_AS,
    Attribute,
    Checksums,
    DatasetSpec,
    as_bytes,
    to_records,
)
from hpcllm.checkpoint.plan import check_slab, fault_of_arrays, fault_of_slabs, merge
from hpcllm.checkpoint.slabs import Slab, runs
from hpcllm.errors import CheckpointError, HpcllmError
from hpcllm.raw_hdf5 import allocate, sync, write_at
from hpcllm.together import on_root, raise_together

_ALIGN_BYTES = 4096  # what is as large begins a page; to align the small ones too costs HDF5 quadratic time
_TABLE_BYTES = 8192  # at most so much a dataset for alignment, header, checksum and guard
_HEADROOM_BYTES = 1 << 20  # for attributes


@dataclass(frozen=True)
class WriteReport:
    """What a write took, from the first agreement to the rename, all ranks and their fsync included."""

    path: Path
    bytes: int  # of tensor data, all ranks
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def write(
    path: Path,
    comm: MPI.Intracomm,
    datasets: Mapping[str, DatasetSpec],
    slabs: Mapping[Slab, np.ndarray],
    attributes: Mapping[str, Attribute],
) -> WriteReport:
    """Write `path` from the slabs of all ranks; together they hold every element exactly once. Collective over comm.

    datasets: specs of at least the datasets of this rank's slabs. slabs: C-contiguous little-endian arrays of the
    slab's shape and of the stored type; they are not copied. attributes: "group/name" -> value, rank 0's count.
    Raises CheckpointError on all ranks, naming rank, path and reason; the temporary file is then gone and what was
    at `path` is untouched.
    """
    raise_together(comm, fault_of_arrays(datasets, slabs))
    return write_as_read(path, comm, datasets, slabs, slabs.__getitem__, attributes)


def write_as_read(
    path: Path,
    comm: MPI.Intracomm,
    datasets: Mapping[str, DatasetSpec],
    slabs: Collection[Slab],
    read: Callable[[Slab], np.ndarray],
    attributes: Mapping[str, Attribute],
) -> WriteReport:
    """`write` for a source that is larger than memory: at most two slabs of this rank exist at a time.

    read: gives the array of a slab, as `write` wants it; called once for each, in their order. What it raises of
    HpcllmError, all ranks raise.
    """
    started_s = time.perf_counter()
    raise_together(comm, fault_of_slabs(datasets, slabs))
    asked = comm.gather((dict(datasets), [slab for slab in slabs if slab.elements]), root=0)
    specs = on_root(comm, lambda: merge(path, asked or []))
    temporary = Path(comm.bcast(str(_temporary(path)), root=0))
    try:
        offsets = on_root(comm, lambda: _create(temporary, specs, path))
        checksums = _write_together(temporary, comm, specs, offsets, slabs, read)
        on_root(comm, lambda: _finish(temporary, path, specs, offsets, checksums, attributes))
    except BaseException:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise
    return WriteReport(path, sum(spec.bytes for spec in specs.values()), time.perf_counter() - started_s)


def _temporary(path: Path) -> Path:
    """Beside the target, so that the rename stays on one file system; host and process tell whether it is stale."""
    return path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def _create(temporary: Path, specs: Mapping[str, DatasetSpec], path: Path) -> dict[str, int]:
    """Make the file with every dataset allocated and none written. Returns dataset -> byte offset in the file."""
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        _check_space(temporary.parent, specs)
        with h5py.File(
            temporary,
            "x",
            libver=("v108", "v110"),  # tools built on HDF5 1.10 open it
            locking=False,  # the name is ours alone, and parallel file systems often refuse locks
            userblock_size=guard.block_bytes(len(specs)),
            alignment_threshold=_ALIGN_BYTES,
            alignment_interval=_ALIGN_BYTES,
        ) as file:
            offsets = {name: _allocate(file, name, spec) for name, spec in specs.items()}
        sync(temporary)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"cannot create {path}: {_reason(error)}") from error
    return offsets


def _check_space(folder: Path, specs: Mapping[str, DatasetSpec]) -> None:
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    needed = sum(spec.bytes for spec in specs.values()) + _TABLE_BYTES * len(specs) + _HEADROOM_BYTES
    if needed > free:
        raise CheckpointError(f"{folder} has {free:,} bytes free, but the checkpoint needs {needed:,}; make room there")


def _allocate(file: h5py.File, name: str, spec: DatasetSpec) -> int:
    offset = allocate(file, name, spec.shape, STORED_AS[spec.dtype])
    if spec.dtype == "bfloat16":
        file[name].attrs[DTYPE_ATTRIBUTE] = spec.dtype
    return offset


def _write_together(
    temporary: Path,
    comm: MPI.Intracomm,
    specs: Mapping[str, DatasetSpec],
    offsets: Mapping[str, int],
    slabs: Collection[Slab],
    read: Callable[[Slab], np.ndarray],
) -> list[Checksums]:
    """Every rank writes its slabs; rank 0 gets the checksums of each. Collective over comm."""
    checksums: Checksums = []
    error: HpcllmError | None = None
    try:
        checksums = _write_slabs(temporary, specs, offsets, slabs, read)
    except OSError as fault:
        error = CheckpointError(f"cannot write {temporary}: {_reason(fault)}")
    except HpcllmError as fault:
        error = fault
    raise_together(comm, error)
    return comm.gather(checksums, root=0) or []


def _write_slabs(
    path: Path,
    specs: Mapping[str, DatasetSpec],
    offsets: Mapping[str, int],
    slabs: Collection[Slab],
    read: Callable[[Slab], np.ndarray],
) -> Checksums:
    written = [slab for slab in slabs if slab.elements]
    checksums: list[Future[int]] = []
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(1) as beside:  # checksums cost little while the file system is what we wait for
            for slab in written:
                array = read(slab)
                check_slab(slab, array, specs[slab.dataset])
                checksums.append(beside.submit(zlib.crc32, as_bytes(array)))
                _write_runs(descriptor, as_bytes(array), slab, specs[slab.dataset], offsets[slab.dataset])
                if len(checksums) > 1:
                    checksums[-2].result()  # it holds the array before this one
            os.fsync(descriptor)
            return [(slab, crc.result()) for slab, crc in zip(written, checksums, strict=True)]
    finally:
        os.close(descriptor)


def _write_runs(descriptor: int, data: memoryview, slab: Slab, spec: DatasetSpec, base: int) -> None:
    done = 0
    for offset, length in runs(slab, spec.shape, STORED_AS[spec.dtype].itemsize):
        write_at(descriptor, data[done : done + length], base + offset)
        done += length


def _finish(
    temporary: Path,
    path: Path,
    specs: Mapping[str, DatasetSpec],
    offsets: Mapping[str, int],
    checksums: list[Checksums],
    attributes: Mapping[str, Attribute],
) -> None:
    """Add what only a whole file has, seal it, and give it its name."""
    try:
        with h5py.File(temporary, "r+", libver=("v108", "v110"), locking=False) as file:
            file[CHECKSUMS] = to_records(sorted((record for part in checksums for record in part), key=_in_file_order))
            for key, value in attributes.items():
                group, _, name = key.rpartition("/")
                (file.require_group(group) if group else file).attrs[name] = value
            file.attrs[COMPLETE] = True
        extents = [(offsets[name], spec.bytes) for name, spec in specs.items()]
        guard.seal(temporary, extents, guard.block_bytes(len(specs)))
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"cannot finish {path}: {_reason(error)}") from error


def _in_file_order(record: tuple[Slab, int]) -> tuple[str, tuple[int, ...]]:
    return record[0].dataset, record[0].start


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
