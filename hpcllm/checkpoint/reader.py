"""Read any slab of a checkpoint on any rank, verifying every byte before it is returned.

    rank 0   read and check the directory --+
    all                                     +--> directory --> the blocks that my slab touches: pread, XXH3, copy

    blocks   [  0  ][  1  ][  2  ]      1 is wholly in the slab, in one stretch: it is read to where it belongs
    slab        | . . . . . |           0 and 2 are read into scratch memory, and a part of each is copied

In an archive a block lies packed; the block itself is verified. Reading is not collective: restore.py reads for all
ranks together, each block once. Works without MPI: comm=None.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcllm.checkpoint.directory import PACKED_WORDS, Stored, Tables, open_regular, read_tables
from hpcllm.checkpoint.header import parse_index
from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, as_bytes, checksum, checksum_ranges, unpack
from hpcllm.checkpoint.slabs import Slab, fits, intersection, part_of, stretch, whole
from hpcllm.errors import CheckpointError
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed
from hpcllm.system.raw_files import disk_errors, read_at

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 16  # a file system gives no more to one process, and each holds a few blocks


class Checkpoint:
    """An open checkpoint; close it, or use it in a `with` statement."""

    def __init__(self, path: Path, comm: MPI.Intracomm | None, tables: Tables, descriptor: int) -> None:
        self.path, self.comm, self._descriptor = path, comm, descriptor
        index = parse_index(tables.index)
        self.attributes, self.file_bytes = index.attributes, index.file_bytes
        self.is_packed = tables.packed is not None  # an archive
        self.datasets: dict[str, Stored] = {}
        for name, places in checksum_ranges(index.datasets).items():
            part = slice(places.start, places.stop)
            packed = None if tables.packed is None else tables.packed[part]
            spec, offset = index.datasets[name], index.offsets.get(name, 0)
            self.datasets[name] = Stored(name, spec, offset, tables.checksums[part], packed)

    @classmethod
    def open(cls, path: Path, comm: MPI.Intracomm | None = None) -> Checkpoint:
        """Check all but the tensors, on rank 0. Collective over comm. Raises CheckpointError on all ranks."""
        descriptor, error = -1, None
        try:
            descriptor = open_regular(path)
        except CheckpointError as fault:
            error = fault
        try:
            raise_if_any_failed(comm, error)
            return cls(path, comm, _broadcast_tables(descriptor, path, comm), descriptor)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def specs(self) -> dict[str, DatasetSpec]:
        return {name: stored.spec for name, stored in self.datasets.items()}

    def stored(self, slab: Slab) -> Stored:
        """The dataset that has the slab. Raises CheckpointError if there is none."""
        stored = self.datasets.get(slab.dataset)
        if stored is None or not fits(slab, stored.spec.shape):
            has = f"has shape {stored.spec.shape}" if stored else "is not in the file"
            raise CheckpointError(f"{self.path}: cannot read {slab}: {slab.dataset} {has}")
        return stored

    def read(self, slab: Slab) -> np.ndarray:
        """Read a slab's elements, in its shape and the stored type (bfloat16 as uint16). Not collective.

        Raises CheckpointError if the slab is not in the file or a block that it touches has changed.
        """
        stored = self.stored(slab)
        values = np.empty(slab.shape, dtype=STORED_AS[stored.spec.dtype])
        for index in stored.spec.touching(slab):
            block = stored.block(index)
            both = intersection(slab, block)
            place = stretch(block, slab) if both == block else None
            if place is not None:
                self.fill_block(slab.dataset, index, as_bytes(values.reshape(-1)[place : place + block.elements]))
            else:
                values[part_of(both, slab)] = self.read_block(slab.dataset, index)[part_of(both, block)]
        return values

    def read_whole(self, dataset: str) -> np.ndarray:
        """Read all of a dataset; as `read`."""
        if dataset not in self.datasets:
            raise CheckpointError(f"{self.path}: {dataset} is not in the file")
        return self.read(whole(dataset, self.datasets[dataset].spec.shape))

    def read_block(self, dataset: str, index: int) -> np.ndarray:
        """Read a block, in its shape and the stored type. Not collective, for any thread. Raises CheckpointError."""
        stored = self.datasets[dataset]
        values = np.empty(stored.block(index).shape, dtype=STORED_AS[stored.spec.dtype])
        self.fill_block(dataset, index, as_bytes(values))
        return values

    def fill_block(self, dataset: str, index: int, out: memoryview) -> None:
        """Read a block into `out`, its bytes, and verify it. Not collective, for any thread. Raises CheckpointError."""
        stored = self.datasets[dataset]
        if stored.packed is None:
            self._pread(stored, index, out, stored.extent(index)[0])
        else:
            self._unpack(stored, index, out, stored.packed[index])
        self._compare(stored, index, checksum(out), int(stored.checksums[index]))

    def map(self) -> mmap.mmap:
        """Map all bytes of the file, file_bytes, into memory, read-only; stays when the file is closed.

        Not collective. Nothing is verified. Raises CheckpointError.
        """
        with disk_errors(CheckpointError, f"{self.path}: cannot be mapped"):
            return mmap.mmap(self._descriptor, self.file_bytes, access=mmap.ACCESS_READ)

    def _unpack(self, stored: Stored, index: int, out: memoryview, packed: np.ndarray) -> None:
        offset, length, xxh3 = map(int, packed)
        what, spec = _name(stored, index), stored.spec
        if length > spec.chunk_bytes:
            raise CheckpointError(
                f"{self.path}: {what} is packed into {length:,} bytes; valid: up to {spec.chunk_bytes:,}"
            )
        chunk = memoryview(bytearray(length))
        self._pread(stored, index, chunk, offset)
        self._compare(stored, index, checksum(chunk), xxh3)
        try:
            unpack(chunk, out, spec.item_bytes, spec.chunk_bytes)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {what} {error}") from error

    def _pread(self, stored: Stored, index: int, out: memoryview, offset: int) -> None:
        with disk_errors(CheckpointError, f"{self.path}: cannot read {_name(stored, index)}"):
            count = read_at(self._descriptor, out, offset)
        if count < len(out):
            raise CheckpointError(
                f"{self.path}: ends at byte {offset + count:,}, inside {_name(stored, index)}; it was cut"
            )

    def _compare(self, stored: Stored, index: int, now: int, then: int) -> None:
        if now != then:
            raise CheckpointError(
                f"{self.path}: {_name(stored, index)} has changed since it was written: XXH3 {now:016x}, written as "
                f"{then:016x}"
            )


def map_ahead(work: Callable[[T], R], items: Iterable[T], ranks: int = 1) -> Iterator[R]:
    """Yield work(item) of each item in their order, done by a few threads: checksums, Zstandard and reads need no GIL.

    items     0 1 2 3 4 5 6 7 ...
    threads       . . . . .          taken in order: 1 was the last, 2 is next; at most two a thread are not yet taken

    ranks: of the job, for a share of this process's cores. An error of `work` is raised where its result would be.
    """
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))
    caller = threading.get_ident()
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # what is left behind half way may be collected by a thread of this very pool, which cannot wait for itself
        pool.shutdown(wait=threading.get_ident() == caller, cancel_futures=True)


def _name(stored: Stored, index: int) -> str:
    block = stored.block(index)
    return f"{stored.name} from {block.start}, shape {block.shape},"


def _broadcast_tables(descriptor: int, path: Path, comm: MPI.Intracomm | None) -> Tables:
    """Read the tables on rank 0; all ranks get them. Collective over comm. Raises CheckpointError on all ranks."""
    tables: list[Tables] = []

    def read() -> tuple[bytes, int, bool]:
        tables.append(read_tables(descriptor, path))
        return tables[0].index, len(tables[0].checksums), tables[0].packed is not None

    index, blocks, is_archive = on_root(comm, read)
    if comm is None:
        return tables[0]
    packed = np.empty((blocks, PACKED_WORDS), "<u8") if is_archive else None
    shared = tables[0] if tables else Tables(index, np.empty(blocks, "<u8"), packed)
    comm.Bcast(as_bytes(shared.checksums), root=0)
    if shared.packed is not None:
        comm.Bcast(as_bytes(shared.packed), root=0)
    return shared
