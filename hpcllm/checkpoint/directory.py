"""Directory of a checkpoint file: everything but the tensors, read by one process and checked before it is used.

    header -> index -> every extent inside the file, and no two share a byte -> every byte that is not a tensor's has
    the checksum it was written with -> /checksums, and in an archive /packed: where each packed block lies

A file may come from anyone: no more is read, allocated or parsed than a file of its size could need, and every fault is
a CheckpointError that names it. Only regular files are opened, never a directory, a pipe that nobody writes to, or a
device without an end; links are followed. All reading goes through one descriptor, so a file that replaces another of
the same name does not mix with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcllm.checkpoint.header import Extent, Index, check_header, gaps_between, parse_index, read_header
from hpcllm.checkpoint.layout import CHECKSUMS, PACKED, DatasetSpec, as_bytes
from hpcllm.checkpoint.slabs import Slab
from hpcllm.config import input_files
from hpcllm.errors import CheckpointError
from hpcllm.system.raw_files import disk_errors, read_at

PACKED_WORDS = 3  # offset, bytes, XXH3 of the bytes of a packed block
_TABLE = np.dtype("<u8")


@dataclass(frozen=True)
class Stored:
    """A dataset of the file, with the place and checksum of each of its blocks."""

    name: str
    spec: DatasetSpec
    offset: int  # of its first byte; 0 in an archive
    checksums: np.ndarray  # (blocks,) uint64
    packed: np.ndarray | None = None  # (blocks, 3) uint64, in an archive: offset, bytes, XXH3 of each packed block

    def block(self, index: int) -> Slab:
        return self.spec.block(self.name, index)

    def extent(self, index: int) -> Extent:
        """Offset in the file and length of a block, in bytes."""
        if self.packed is not None:
            return int(self.packed[index, 0]), int(self.packed[index, 1])
        slab = self.block(index)
        return self.offset + self.spec.block_offset(slab), slab.elements * self.spec.item_bytes


@dataclass(frozen=True)
class Tables:
    """Checked bytes of index and tables, as they lie in a file; rank 0 sends them to other ranks."""

    index: bytes
    checksums: np.ndarray  # (blocks,) uint64
    packed: np.ndarray | None  # (blocks, 3) uint64, in an archive


def read_tables(descriptor: int, path: Path) -> Tables:
    """Read and check everything but the tensors. path: for messages. Raises CheckpointError."""
    with disk_errors(CheckpointError, f"cannot read {path}"):
        try:
            return _read_tables(descriptor)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except MemoryError as error:
            raise CheckpointError(f"{path}: there is no memory for its tables: {error}") from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading; returns a descriptor, to be closed by the caller. Raises CheckpointError."""
    with disk_errors(CheckpointError, f"cannot read {path}"):
        return input_files.open_regular(path)


def is_ours(path: Path) -> bool:
    """True if a file begins as our checkpoints do, sound or not. Raises CheckpointError if it cannot be read."""
    descriptor = open_regular(path)
    with disk_errors(CheckpointError, f"cannot read {path}"):
        try:
            read_header(descriptor)
        except CheckpointError:
            return False
        finally:
            os.close(descriptor)
    return True


def _read_tables(descriptor: int) -> Tables:
    header = read_header(descriptor)
    text = header.body.rstrip(b"\0")
    index = parse_index(text)
    file_bytes = os.fstat(descriptor).st_size
    if index.file_bytes != file_bytes:
        raise CheckpointError(f"has {file_bytes} bytes, but {index.file_bytes} were written; it was cut or added to")
    checksums = _table(descriptor, index, CHECKSUMS)
    packed = None
    if PACKED in index.tables:
        packed = _table(descriptor, index, PACKED).reshape(-1, PACKED_WORDS)
    extents = index.tensor_extents(packed)
    tables = [(offset, size) for name, offset in index.tables.items() if (size := _table_bytes(index, name))]
    gaps_between(np.concatenate([extents, np.array(tables, np.uint64).reshape(-1, 2)]), header.size, file_bytes)
    check_header(descriptor, header, index, extents)
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
