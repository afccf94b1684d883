"""Read any slab of a checkpoint on any rank, and know that its bytes are the ones that were written.

    rank 0   read and check the directory --+
    all                                     +--> directory --> pread the runs of my slab --> crc32 of the stored slabs
                                                                                             that it touches

    stored   [  0  ][  1  ][  2  ]      0 is wholly in what was read: its crc32 is taken there
    read     |  . . . . . .  |          2 is not: the rest of it is read too, unless all ranks have verified it together

No byte is handed out that was not verified. A rank of another layout than the writer's may need parts of many stored
slabs; `verify` reads each of them once, whatever the number of ranks. Works without MPI: comm=None.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcllm.checkpoint.directory import Directory, Stored, read_directory
from hpcllm.checkpoint.layout import STORED_AS, Attribute, as_bytes
from hpcllm.checkpoint.slabs import Slab, fits, overlap, part_of, runs, share, whole
from hpcllm.errors import CheckpointError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_REQUEST_BYTES = 1 << 23


class Checkpoint:
    """An open checkpoint; close it, or use it in a `with` statement. Reading is not collective, `verify` is."""

    def __init__(self, path: Path, comm: MPI.Intracomm | None, directory: Directory, descriptor: int) -> None:
        self.path = path
        self.comm = comm
        self.datasets: Mapping[str, Stored] = directory.datasets
        self.attributes: Mapping[str, Attribute] = directory.attributes
        self.file_bytes = directory.file_bytes
        self._descriptor = descriptor
        self._verified: set[str] = set()  # datasets of which every byte was, by this rank or another one

    @classmethod
    def open(cls, path: Path, comm: MPI.Intracomm | None = None) -> Checkpoint:
        """Check all but the tensors, on rank 0. Collective over comm. Raises CheckpointError on all ranks."""
        directory = on_root(comm, lambda: read_directory(path))
        descriptor, error = -1, None
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as fault:
            error = CheckpointError(f"cannot read {path}: {fault.strerror}")
        checkpoint = cls(path, comm, directory, descriptor)
        try:
            raise_together(comm, error)
        except CheckpointError:
            checkpoint.close()
            raise
        return checkpoint

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, slab: Slab) -> np.ndarray:
        """The slab's elements, in its shape and the stored type (bfloat16 as uint16). Not collective.

        Raises CheckpointError if the slab is not in the file or a stored slab that it touches has changed.
        """
        stored = self.datasets.get(slab.dataset)
        if stored is None or not fits(slab, stored.spec.shape):
            has = f"has shape {stored.spec.shape}" if stored else "is not in the file"
            raise CheckpointError(f"{self.path}: cannot read {slab}: {slab.dataset} {has}")
        values = np.empty(slab.shape, dtype=STORED_AS[stored.spec.dtype])
        self._fill(as_bytes(values), slab, stored)
        for inner, crc in stored.checksums:
            if (part := part_of(inner, slab)) is not None:
                self._compare(inner, zlib.crc32(as_bytes(np.ascontiguousarray(values[part]))), crc)
            elif slab.dataset not in self._verified and overlap(inner, slab):
                self._verify(inner, crc)
        return values

    def read_whole(self, dataset: str) -> np.ndarray:
        """All of a dataset; as `read`."""
        if dataset not in self.datasets:
            raise CheckpointError(f"{self.path}: {dataset} is not in the file")
        return self.read(whole(dataset, self.datasets[dataset].spec.shape))

    def verify(self, kind: str = "") -> None:
        """Check every byte of the tensors of a kind, or of all; the ranks share the work. Collective over comm.

        kind: "model", "optimizer/exp_avg", ...; the same on all ranks. Raises CheckpointError on all ranks, naming the
        first damaged slab of each rank that found one.
        """
        names = [name for name in self.datasets if name.startswith(f"{kind}/" if kind else "")]
        slabs = [checksum for name in names for checksum in self.datasets[name].checksums]
        rank, ranks = (self.comm.rank, self.comm.size) if self.comm else (0, 1)
        error = None
        try:
            for at in share([slab.elements for slab, _ in slabs], rank, ranks):
                self._verify(*slabs[at])
        except CheckpointError as fault:
            error = fault
        raise_together(self.comm, error)
        self._verified.update(names)

    def _verify(self, slab: Slab, crc: int) -> None:
        now = 0
        for piece in self._pieces(slab, self.datasets[slab.dataset]):
            now = zlib.crc32(piece, now)
        self._compare(slab, now, crc)

    def _pieces(self, slab: Slab, stored: Stored) -> Iterator[bytearray]:
        for offset, length in runs(slab, stored.spec.shape, STORED_AS[stored.spec.dtype].itemsize):
            for begin in range(0, length, _REQUEST_BYTES):
                count = min(_REQUEST_BYTES, length - begin)
                piece = bytearray(count)
                self._pread(memoryview(piece), stored.offset + offset + begin, slab.dataset)
                yield piece

    def _fill(self, out: memoryview, slab: Slab, stored: Stored) -> None:
        done = 0
        for offset, length in runs(slab, stored.spec.shape, STORED_AS[stored.spec.dtype].itemsize):
            self._pread(out[done : done + length], stored.offset + offset, slab.dataset)
            done += length

    def _pread(self, out: memoryview, offset: int, dataset: str) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done : done + _REQUEST_BYTES]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot read {dataset}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}, inside {dataset}; it was cut")
            done += count

    def _compare(self, slab: Slab, now: int, then: int) -> None:
        if now != then:
            raise CheckpointError(
                f"{self.path}: {slab.dataset} from {slab.start}, shape {slab.shape}, has changed since it was written: "
                f"crc32 {now:08x}, written as {then:08x}"
            )


def on_root(comm: MPI.Intracomm | None, function: Callable[[], T]) -> T:
    """together.on_root, or just the call where there is no MPI."""
    if comm is None:
        return function()
    from hpcllm import together

    return together.on_root(comm, function)


def raise_together(comm: MPI.Intracomm | None, error: Exception | None) -> None:
    """together.raise_together, or just the raise where there is no MPI."""
    if comm is None:
        if error:
            raise error
        return
    from hpcllm import together

    together.raise_together(comm, error)
