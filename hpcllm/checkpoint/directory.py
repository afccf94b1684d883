"""What a checkpoint file says that it holds, read by one process and believed only after it was checked.

    front of the file -> index -> every extent inside the file, and no two share a byte -> all that is no tensor's is as
    it was written -> /checksums, and in an archive /packed: where each packed block lies

A file may come from anyone: no more is read, allocated or parsed than a file of its size could need, and what is wrong
is a CheckpointError that says so. A regular file of ours is all that is ever opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcllm.checkpoint import guard
from hpcllm.checkpoint.blocks import first_element
from hpcllm.checkpoint.guard import Extent
from hpcllm.checkpoint.index import Index, parse_index
from hpcllm.checkpoint.layout import CHECKSUMS, PACKED, Attribute, DatasetSpec, as_bytes, checksum_ranges
from hpcllm.checkpoint.regular import open_regular, read_at
from hpcllm.checkpoint.slabs import Slab
from hpcllm.errors import CheckpointError

_TABLE = np.dtype("<u8")
PACKED_WORDS = 3  # offset, bytes, XXH3 of the bytes of a packed block


@dataclass(frozen=True)
class Stored:
    """A dataset of the file, and what is known of each of its blocks."""

    name: str
    spec: DatasetSpec
    offset: int  # of its first byte; 0 in an archive
    checksums: np.ndarray  # (blocks,) uint64
    packed: np.ndarray | None = None  # (blocks, 3) uint64, in an archive: offset, bytes, XXH3 of each as it lies there

    def block(self, index: int) -> Slab:
        return self.spec.block(self.name, index)

    def extent(self, index: int) -> Extent:
        """Offset in the file and length of a block, in bytes."""
        if self.packed is not None:
            return int(self.packed[index, 0]), int(self.packed[index, 1])
        slab = self.block(index)
        return self.offset + first_element(slab, self.spec.shape) * self.spec.item_bytes, self.bytes_of(slab)

    def bytes_of(self, slab: Slab) -> int:
        """Of a slab's elements in memory."""
        return slab.elements * self.spec.item_bytes


@dataclass(frozen=True)
class Directory:
    """All of a file but the tensors."""

    file_bytes: int
    datasets: dict[str, Stored]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class Tables:
    """What makes a directory, as it lies in a file: checked, and fit to be sent to other ranks."""

    index: bytes
    checksums: np.ndarray  # (blocks,) uint64
    packed: np.ndarray | None  # (blocks, 3) uint64, in an archive


def read_directory(path: Path) -> Directory:
    """Read and check everything but the tensors. Not collective. Raises CheckpointError."""
    descriptor = open_regular(path)
    try:
        return make_directory(read_tables(descriptor, path))
    finally:
        os.close(descriptor)


def read_tables(descriptor: int, path: Path) -> Tables:
    """Read and check everything but the tensors. path: for messages. Raises CheckpointError."""
    try:
        return _read_tables(descriptor)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is no memory for its tables: {error}") from error


def make_directory(tables: Tables) -> Directory:
    """tables: of read_tables."""
    index = parse_index(tables.index)
    datasets = {}
    for name, place in checksum_ranges(index.datasets).items():
        part = slice(place.start, place.stop)
        packed = None if tables.packed is None else tables.packed[part]
        spec, offset = index.datasets[name], index.offsets.get(name, 0)
        datasets[name] = Stored(name, spec, offset, tables.checksums[part], packed)
    return Directory(index.file_bytes, datasets, index.attributes)


def _read_tables(descriptor: int) -> Tables:
    front = guard.read_front(descriptor)
    text = front.body.rstrip(b"\0")
    index = parse_index(text)
    file_bytes = os.fstat(descriptor).st_size
    if index.file_bytes != file_bytes:
        raise CheckpointError(f"has {file_bytes} bytes, but {index.file_bytes} were written; it was cut or added to")
    checksums = _table(descriptor, index, CHECKSUMS)
    packed = None
    if PACKED in index.tables:
        packed = _table(descriptor, index, PACKED).reshape(-1, PACKED_WORDS)
    extents = guard.tensor_extents(index, packed)
    tables = [(offset, size) for name, offset in index.tables.items() if (size := _table_bytes(index, name))]
    guard.outside(np.concatenate([extents, np.array(tables, np.uint64).reshape(-1, 2)]), front.bytes, file_bytes)
    guard.check(descriptor, front, index, extents)
    return Tables(text, checksums, packed)


def _table(descriptor: int, index: Index, name: str) -> np.ndarray:
    size, offset = _table_bytes(index, name), index.tables[name]
    if offset + size > index.file_bytes:
        raise CheckpointError(f"{index.blocks:,} blocks need {size:,} bytes for /{name}, but it begins at {offset:,}")
    table = np.empty(size // _TABLE.itemsize, _TABLE)
    if read_at(descriptor, as_bytes(table), offset) < size:
        raise CheckpointError(f"ends inside /{name}; it was cut")
    return table


def _table_bytes(index: Index, name: str) -> int:
    return index.blocks * _TABLE.itemsize * (PACKED_WORDS if name == PACKED else 1)
