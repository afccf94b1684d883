"""Write one HDF5 file by all ranks at once, with the h5py that pip installs.

    rank 0   create the file ----------------+                              +--- checksums, attributes, header, rename
             (every dataset has its bytes,   | offsets                      | xxh3 of each block
              none is written yet)           v                              ^
    all      parts of blocks to their owners (exchange.py) --> one pwrite a block, xxh3, fsync

HDF5 can allocate a contiguous dataset early, never fill it, and tell where it lies; so ranks write raw bytes there
with no parallel HDF5, no MPI-IO and no lock: writer = "offsets". With a parallel HDF5 there is a second way to the same
file: writer = "mpio". The file has a temporary name until it is whole and on disk: whatever happens before the rename,
the previous file of that name is still there. A write may run in a thread, on a communicator of its own: its waits
sleep.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from hpcllm.checkpoint import file_layout
from hpcllm.checkpoint.agreement import make_plan
from hpcllm.checkpoint.exchange import FirstError, to_owners
from hpcllm.checkpoint.header import Index, header_bytes
from hpcllm.checkpoint.layout import Attribute, DatasetSpec, checksum, checksum_ranges
from hpcllm.checkpoint.plan import Plan, check_array
from hpcllm.checkpoint.slabs import Slab, boxes
from hpcllm.config.schema import CheckpointConfig
from hpcllm.errors import CheckpointError, ConfigError, StallError
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed, rank_and_size
from hpcllm.system.raw_files import disk_errors, sync, write_at

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULTS = CheckpointConfig()
SECONDS = "written/seconds"  # until all blocks were on disk
_BEHIND = 4  # blocks
_LONGEST_S = 99_999_999.999  # no such number has a longer text
REQUEST_BYTES = 1 << 30  # older MPI-IO and HDF5 count bytes of a request in 32 bits


@dataclass(frozen=True)
class WriteReport:
    """Size and time of a write, from the first agreement to the rename, all ranks and their fsync included."""

    path: Path
    bytes: int  # of tensor data, all ranks
    seconds: float
    note: str = ""  # for people, on rank 0: a setting that had no effect

    @property
    def gb_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def check_writer(writer: str) -> None:
    """Raises ConfigError if checkpoint.writer cannot write here; before any work."""
    if writer == "mpio" and not h5py.get_config().mpi:
        raise ConfigError(
            "checkpoint.writer = 'mpio' needs an h5py built with a parallel HDF5, and this one has none; "
            "valid: 'offsets', which writes the same file with any h5py"
        )


def prepare(comm: MPI.Intracomm | None, datasets: Mapping[str, DatasetSpec], slabs: Collection[Slab]) -> Plan:
    """Plan who writes which block; once for a run, whose slabs do not change. Collective over comm.

    datasets: specs of at least the datasets of this rank's slabs. Raises CheckpointError on all ranks if ranks disagree
    on a dataset, or do not hold every element of every dataset exactly once.
    """
    return make_plan(comm, datasets, tuple(slabs), exactly_once=True)


def write(
    path: Path,
    comm: MPI.Intracomm | None,
    plan: Plan,
    array_of: Callable[[Slab], np.ndarray],
    attributes: Mapping[str, Attribute],
    settings: CheckpointConfig = DEFAULTS,
    check: Callable[[], None] = lambda: None,
) -> WriteReport:
    """Write `path` from the slabs of all ranks, as they were prepared. Collective over comm; None: one process.

    array_of: the C-contiguous little-endian array of a slab, of its shape and of the stored type; called once (mpio:
    twice) in about the order of the file, and the array is held no longer than it is needed, so a source whose slabs
    are blocks may be larger than memory. attributes: "group/name" -> value, rank 0's count; the writer adds its own, as
    written/... check: rank 0 calls it last before the file gets its name; if that raises, it gets none.
    Raises CheckpointError on all ranks, naming rank, path and reason, or an HpcllmError that array_of raised; the
    temporary file is then gone and the file at `path` is untouched.
    """
    started_s = time.perf_counter()
    own: dict[str, Attribute] = {"written/writer": settings.writer, "written/ranks": rank_and_size(comm)[1]}
    index = Index(plan.specs, {**own, **attributes, SECONDS: _LONGEST_S})
    with file_layout.temporary_path(path, comm) as temporary:
        note, size = on_root(comm, lambda: _make_room(temporary, path, index, settings))
        if settings.writer == "mpio" and comm:
            offsets = _write_collectively(temporary, comm, plan, array_of, size)
            file = BlockFile(temporary, plan, None)
        else:
            offsets = on_root(comm, lambda: _create(temporary, path, plan.specs, size))
            file = BlockFile(temporary, plan, offsets)
        checksums = _write_blocks(comm, plan, array_of, file)
        own[SECONDS] = round(time.perf_counter() - started_s, 3)

        def finish() -> None:
            check()
            file_layout.finish(temporary, path, Index(plan.specs, {**own, **attributes}, offsets), size, checksums)

        on_root(comm, finish)
    seconds = time.perf_counter() - started_s
    return WriteReport(path, sum(spec.bytes for spec in plan.specs.values()), seconds, note)


class BlockFile:
    """The file as one rank fills it, and the checksums of its blocks; a fault of the file is a CheckpointError.

    Each block is sent to the disk at once, and out of memory _BEHIND blocks later: at the end there is little to wait
    for, and the memory that a node's ranks train in does not fill up with what nobody reads. That is 3 to 4 times as
    fast here as leaving it to fsync.
    """

    def __init__(self, path: Path, plan: Plan, offsets: Mapping[str, int] | None) -> None:
        """offsets: dataset -> first byte in the file; None: the blocks are in the file, only checksums are taken."""
        self._path, self._specs, self._offsets = path, plan.specs, offsets
        self._descriptor = -1
        self._behind: deque[tuple[int, int]] = deque()
        self._first = {name: places.start for name, places in checksum_ranges(plan.specs).items()}
        self.checksums: list[tuple[int, int]] = []  # number of the block in /checksums, its checksum

    def write_block(self, dataset: str, index: int, data: memoryview) -> None:
        """Write block `index` of a dataset, and take its checksum."""
        if self._offsets is not None:
            spec = self._specs[dataset]
            offset = self._offsets[dataset] + spec.block_offset(spec.block(dataset, index))
            with self._errors():
                if self._descriptor < 0:
                    self._descriptor = os.open(self._path, os.O_WRONLY)
                write_at(self._descriptor, data, offset)
            self._drop_from_memory(offset, len(data))
            self._behind.append((offset, len(data)))
            if len(self._behind) > _BEHIND:
                self._drop_from_memory(*self._behind.popleft())
        self.checksums.append((self._first[dataset] + index, checksum(data)))

    def sync(self) -> None:
        """Return once the blocks are on disk."""
        if self._descriptor >= 0:
            with self._errors():
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            with self._errors():
                os.close(self._descriptor)

    def _drop_from_memory(self, offset: int, length: int) -> None:
        """Linux starts to write pages that are not on disk, and forgets those that are; elsewhere nothing happens."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # only advice
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(CheckpointError, f"cannot write {self._path}")


def _make_room(temporary: Path, path: Path, index: Index, settings: CheckpointConfig) -> tuple[str, int]:
    """Make the folder, and an empty file if its stripes are to be set. Returns a note or "", and the header's size."""
    size = header_bytes(index)
    with disk_errors(CheckpointError, f"cannot create {path}"):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        file_layout.check_space(temporary.parent, index.datasets)
        stripes = settings.stripe_count
        return (file_layout.set_stripes(temporary, stripes, settings.stripe_mib) if stripes else ""), size


def _create(temporary: Path, path: Path, specs: Mapping[str, DatasetSpec], size: int) -> dict[str, int]:
    with disk_errors(CheckpointError, f"cannot create {path}"):
        offsets = file_layout.allocate_datasets(temporary, specs, size)
        sync(temporary)
        return offsets


def _write_blocks(
    comm: MPI.Intracomm | None, plan: Plan, array_of: Callable[[Slab], np.ndarray], file: BlockFile
) -> np.ndarray:
    """Write this rank's blocks. Collective over comm. Returns the checksums of all blocks on rank 0."""

    def checked(slab: Slab) -> np.ndarray:
        array = array_of(slab)
        check_array(slab, array, plan.specs[slab.dataset])
        return array

    error = None
    try:
        with contextlib.closing(file):
            to_owners(plan, comm, checked, file.write_block)
            file.sync()
    except StallError:
        raise
    except Exception as fault:
        error = fault
    raise_if_any_failed(comm, error)
    found = np.array(file.checksums, np.uint64).reshape(-1, 2)
    table: np.ndarray = np.concatenate((comm.gather(found, root=0) if comm else None) or [found])
    checksums: np.ndarray = table[table[:, 0].argsort(), 1]
    return checksums


def _write_collectively(
    temporary: Path, comm: MPI.Intracomm, plan: Plan, array_of: Callable[[Slab], np.ndarray], header_bytes: int
) -> dict[str, int]:
    """Create the file and write all slabs by a parallel HDF5: h5py built with MPI, collective writes through MPI-IO.

        all     create the file together, then for each dataset, in the order of names
                  write 1 .. n    n: the most slabs that a rank has of it, cut to requests below 2 GiB;
                                  a rank with fewer takes part with nothing, or the others would wait for it for ever

    MPI-IO waits on a core of its own. If HDF5 fails on one rank alone inside a collective call, the others may not come
    back from it: `offsets`, the default, has no such call. Collective over comm. Returns dataset -> byte offset.
    Raises CheckpointError on all ranks, or an HpcllmError that array_of raised.
    """
    error: Exception | None = None
    offsets: dict[str, int] = {}
    try:
        with disk_errors(CheckpointError, f"cannot write {temporary}"):
            offsets = file_layout.allocate_datasets(temporary, plan.specs, header_bytes, driver="mpio", comm=comm)
            with h5py.File(temporary, "r+", driver="mpio", comm=comm) as file:
                error = _write_all(file, comm, plan, array_of)
                file.flush()
    except CheckpointError as fault:
        error = fault
    raise_if_any_failed(comm, error)
    return offsets


def _write_all(
    file: h5py.File, comm: MPI.Intracomm, plan: Plan, array_of: Callable[[Slab], np.ndarray]
) -> Exception | None:
    """Write all slabs; returns the error of array_of on this rank, which has written nothing from there on."""
    from mpi4py import MPI

    slabs: dict[str, list[Slab]] = {name: [] for name in plan.specs}
    for slab in plan.slabs:
        slabs[slab.dataset].append(slab)
    calls = np.array([sum(1 for slab in slabs[name] for _ in _requests(slab, plan)) for name in plan.specs], np.int64)
    comm.Allreduce(MPI.IN_PLACE, calls, MPI.MAX)
    first = FirstError()
    for name, count in zip(plan.specs, calls, strict=True):
        dataset = file[name].id
        done = 0
        for slab in slabs[name]:
            with first:
                array = array_of(slab)
                check_array(slab, array, plan.specs[name])
            for start, shape in _requests(slab, plan):
                inside = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                values = None if first.error else np.ascontiguousarray(array[inside]).reshape(shape)
                _write_one(dataset, slab.start, start, values)
                done += 1
        for _ in range(done, count):
            _write_one(dataset, (), (), None)
    return first.error


def _requests(slab: Slab, plan: Plan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and shape of the boxes within a slab that are written by one call each."""
    most = max(1, REQUEST_BYTES // plan.dtype(slab).itemsize)
    for begin in range(0, slab.elements, most):
        yield from boxes(slab.shape, begin, min(begin + most, slab.elements))


def _write_one(
    dataset: h5py.h5d.DatasetID, origin: tuple[int, ...], start: tuple[int, ...], values: np.ndarray | None
) -> None:
    """Collective; values: None to write nothing, otherwise what begins at origin + start of the dataset."""
    transfer = h5py.h5p.create(h5py.h5p.DATASET_XFER)
    transfer.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
    target = dataset.get_space()
    if values is None:
        target.select_none()
        memory, values = h5py.h5s.create_simple((1,)), np.empty(1, dataset.dtype)
        memory.select_none()
    elif values.shape:
        target.select_hyperslab(tuple(o + s for o, s in zip(origin, start, strict=True)), values.shape)
        memory = h5py.h5s.create_simple(values.shape)
    else:
        memory = h5py.h5s.create(h5py.h5s.SCALAR)
    dataset.write(memory, target, values, dxpl=transfer)
