"""One HDF5 file written by all ranks at once, with the h5py that pip installs.

    rank 0   make the file ------------------+                              +--- checksums, attributes, front, rename
             (every dataset has its bytes,   | offsets                      | xxh3 of each block
              none is written yet)           v                              ^
    all      parts of blocks to their owners (exchange.py) --> one pwrite a block, xxh3, fsync

HDF5 can allocate a contiguous dataset early, never fill it, and tell where it lies; so ranks write raw bytes there
with no parallel HDF5, no MPI-IO and no lock (writer = "offsets"; mpio.py is the other way to the same file). The file
has a temporary name until it is whole and on disk: whatever happens before the rename, the previous file of that name
is still there. A write may run in a thread, on a communicator of its own: its waits sleep.
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

import numpy as np

from hpcllm.checkpoint import guard, skeleton
from hpcllm.checkpoint.blocks import first_element
from hpcllm.checkpoint.exchange import make_plan, to_owners
from hpcllm.checkpoint.index import Index
from hpcllm.checkpoint.layout import Attribute, DatasetSpec, checksum, checksum_ranges
from hpcllm.checkpoint.plan import Plan, check_array
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.striping import set_stripes
from hpcllm.errors import CheckpointError, StallError
from hpcllm.raw_hdf5 import sync, write_at
from hpcllm.together import on_root, place_in, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

BEHIND = 4  # blocks
SECONDS = "written/seconds"  # until all blocks were on disk
_LONGEST_S = 99_999_999.999  # no such number has a longer text


@dataclass(frozen=True)
class Settings:
    """How a file is written; [checkpoint] of a run file."""

    writer: str = "offsets"  # or "mpio"
    stripe_count: int = 0  # Lustre targets, -1 for all; 0: as the folder says
    stripe_mib: int = 16


@dataclass(frozen=True)
class WriteReport:
    """What a write took, from the first agreement to the rename, all ranks and their fsync included."""

    path: Path
    bytes: int  # of tensor data, all ranks
    seconds: float
    note: str = ""  # for people, on rank 0: a wish that the file system did not grant

    @property
    def gb_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def prepare(comm: MPI.Intracomm | None, datasets: Mapping[str, DatasetSpec], slabs: Collection[Slab]) -> Plan:
    """Who writes which block; once for a run, whose slabs do not change. Collective over comm.

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
    settings: Settings = Settings(),
    check: Callable[[], None] = lambda: None,
) -> WriteReport:
    """Write `path` from the slabs of all ranks, as they were prepared. Collective over comm; None: one process.

    array_of: the C-contiguous little-endian array of a slab, of its shape and of the stored type; asked for once (mpio:
    twice) in about the order of the file and held no longer than it is needed, so a source whose slabs are blocks may
    be larger than memory. attributes: "group/name" -> value, rank 0's count; what the writer knows of itself is added,
    as written/... check: rank 0 calls it last before the file gets its name; if that raises, it gets none.
    Raises CheckpointError on all ranks, naming rank, path and reason, or what an array_of raised of HpcllmError; the
    temporary file is then gone and what was at `path` is untouched.
    """
    started_s = time.perf_counter()
    said: dict[str, Attribute] = {"written/writer": settings.writer, "written/ranks": place_in(comm)[1]}
    index = Index(plan.specs, {**said, **attributes, SECONDS: _LONGEST_S})
    with skeleton.aside(path, comm) as temporary:
        note, front = on_root(comm, lambda: _make_room(temporary, path, index, settings))
        if settings.writer == "mpio" and comm:
            from hpcllm.checkpoint import mpio  # starts MPI

            offsets = mpio.write(temporary, comm, plan, array_of, front)
            found = _checksums(comm, plan, array_of, None)
        else:
            offsets = on_root(comm, lambda: _make(temporary, path, plan.specs, front))
            found = _checksums(comm, plan, array_of, Target(temporary, offsets))
        said[SECONDS] = round(time.perf_counter() - started_s, 3)

        def finish() -> None:
            check()
            skeleton.finish(temporary, path, Index(plan.specs, {**said, **attributes}, offsets), front, found)

        on_root(comm, finish)
    seconds = time.perf_counter() - started_s
    return WriteReport(path, sum(spec.bytes for spec in plan.specs.values()), seconds, note)


class Target:
    """The file as one rank fills it; what goes wrong with it is a CheckpointError.

    Each block is sent to the disk at once, and out of memory BEHIND blocks later: at the end there is little to wait
    for, and the memory that a node's ranks train in does not fill up with what nobody reads. Here that is 3 to 4 times
    as fast as to leave it to fsync.
    """

    def __init__(self, path: Path, offsets: Mapping[str, int]) -> None:
        self._path = path
        self._offsets = offsets
        self._descriptor = -1
        self._behind: deque[tuple[int, int]] = deque()

    def write(self, block: Slab, spec: DatasetSpec, data: memoryview) -> None:
        with self._said():
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY)
            place = self._offsets[block.dataset] + first_element(block, spec.shape) * spec.item_bytes
            write_at(self._descriptor, data, place)
        self._let_go(place, len(data))
        self._behind.append((place, len(data)))
        if len(self._behind) > BEHIND:
            self._let_go(*self._behind.popleft())

    def sync(self) -> None:
        """On disk when this returns."""
        if self._descriptor >= 0:
            with self._said():
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            with self._said():
                os.close(self._descriptor)

    def _let_go(self, offset: int, length: int) -> None:
        """Linux starts to write what of it is not on disk, and forgets what is; elsewhere nothing."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # an advice
                os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {skeleton.reason(error)}") from error


def _make_room(temporary: Path, path: Path, index: Index, settings: Settings) -> tuple[str, int]:
    """The folder, and an empty file where its stripes are to be set. Returns a note, or "", and the front's size."""
    front = guard.front_bytes(index)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        skeleton.check_space(temporary.parent, index.datasets)
        note = set_stripes(temporary, settings.stripe_count, settings.stripe_mib) if settings.stripe_count else ""
    except OSError as error:
        raise CheckpointError(f"cannot create {path}: {skeleton.reason(error)}") from error
    return note, front


def _make(temporary: Path, path: Path, specs: Mapping[str, DatasetSpec], front: int) -> dict[str, int]:
    try:
        offsets = skeleton.make(temporary, specs, front)
        sync(temporary)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"cannot create {path}: {skeleton.reason(error)}") from error
    return offsets


def _checksums(
    comm: MPI.Intracomm | None, plan: Plan, array_of: Callable[[Slab], np.ndarray], target: Target | None
) -> np.ndarray:
    """Of all blocks, on rank 0; every rank writes its own to the target, if there is one. Collective over comm."""
    first = {name: places.start for name, places in checksum_ranges(plan.specs).items()}
    found = np.zeros((len(plan.own), 2), np.uint64)  # where in the table, and the checksum
    done = 0

    def checked(slab: Slab) -> np.ndarray:
        array = array_of(slab)
        check_array(slab, array, plan.specs[slab.dataset])
        return array

    def take(block: Slab, index: int, data: memoryview) -> None:
        nonlocal done
        if target:
            target.write(block, plan.specs[block.dataset], data)
        found[done] = first[block.dataset] + index, checksum(data)
        done += 1

    error = None
    try:
        with contextlib.closing(target) if target else contextlib.nullcontext():
            to_owners(plan, comm, checked, take)
            if target:
                target.sync()
    except StallError:
        raise
    except Exception as fault:
        error = fault
    raise_together(comm, error)
    table: np.ndarray = np.concatenate((comm.gather(found, root=0) if comm else None) or [found])
    checksums: np.ndarray = table[table[:, 0].argsort(), 1]
    return checksums
