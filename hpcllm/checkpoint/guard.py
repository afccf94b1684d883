"""The front of a checkpoint: an index of what is in it, and a checksum over every byte of the file that is no tensor's.

    | front                          | HDF5 tables | /model/a | HDF5 tables | /model/b | HDF5 tables, /checksums |
    | xxh3, index as JSON, 0 0 0 ...   ^^^^^^^^^^^              ^^^^^^^^^^^              ^^^^^^^^^^^^^^^^^^^^^^^^
      covers itself and everything marked ^; each block of a tensor has its own in /checksums

HDF5 leaves such a "user block" to the application, and its tools skip it. It is written last, so a file that carries it
is complete, and every bit of the file is under exactly one checksum.

Whoever reads for training takes names, shapes and places from the index. The tables are for everyone else: the HDF5
library is never given a file to parse that this process did not make, because tables that were made to harm crash it or
keep it busy for ever. The checksum guards against accidents; against malice, nothing is believed before it was checked.
"""

from __future__ import annotations

import builtins
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpcllm.checkpoint.index import Index, index_text
from hpcllm.errors import CheckpointError

Extent = tuple[int, int]  # offset, length in bytes


@dataclass(frozen=True)
class Front:
    """The first `bytes` of a file: a line of text, then the index, filled up with zeros."""

    bytes: int
    head: builtins.bytes
    body: builtins.bytes


LARGEST_BYTES = 1 << 24  # of a front: more than 100,000 datasets; no more is ever parsed
_PIECE_BYTES = 1 << 23
_TABLES_BYTES = 1 << 24  # what is no tensor's may be so much,
_TABLES_BYTES_EACH = 1 << 14  # and so much for each dataset, its front and page alignment included,
_TABLES_BYTES_BLOCK = 1 << 8  # and each block


def front_bytes(index: Index) -> int:
    """Size of the front that `index` fits into, wherever in the file its datasets will lie: a power of two, as HDF5
    wants it, from 4096 up. Raises CheckpointError."""
    needed = len(_head(0, 0)) + len(index_text(index.placed_last()))
    if needed > LARGEST_BYTES:
        raise CheckpointError(
            f"{len(index.datasets)} datasets and {len(index.attributes)} attributes need an index of {needed:,} bytes; "
            f"valid: up to {LARGEST_BYTES:,}"
        )
    return max(4096, 1 << (needed - 1).bit_length())


def tensor_extents(index: Index, packed: np.ndarray | None) -> np.ndarray:
    """(n, 2) uint64: offset and bytes of each stretch of tensor data. packed: of an archive, its table (blocks, 3)."""
    if packed is not None:
        return packed[:, :2]
    plain = [(offset, index.datasets[name].bytes) for name, offset in index.offsets.items()]
    return np.array(plain, dtype=np.uint64).reshape(-1, 2)


def outside(extents: np.ndarray, first: int, file_bytes: int) -> list[Extent]:
    """What (n, 2) uint64 extents leave of first..file_bytes. Raises CheckpointError where they overlap or leave it."""
    offsets, lengths = extents[extents[:, 0].argsort(kind="stable")].T
    size = np.uint64(file_bytes)
    before = np.append(np.uint64(first), offsets + lengths)  # a sum that wraps round is of one that lies beyond the end
    wrong = (lengths > size) | (offsets > size - np.minimum(lengths, size)) | (offsets < before[:-1])
    if wrong.any():
        offset, length = int(offsets[wrong.argmax()]), int(lengths[wrong.argmax()])
        raise CheckpointError(
            f"bytes {offset}..{offset + length} of a dataset overlap another one or leave {first}..{file_bytes}"
        )
    after = np.append(offsets, size)
    gaps = after > before
    return list(zip(before[gaps].tolist(), (after - before)[gaps].tolist(), strict=True))


def seal(path: Path, index: Index, front: int, packed: np.ndarray | None = None) -> None:
    """Write the front, of `front` bytes, of a file in which everything else is. packed: of an archive, its table.

    front: what front_bytes said before there were offsets. Raises OSError, CheckpointError.
    """
    with path.open("r+b") as file:
        index = dataclasses.replace(index, file_bytes=file.seek(0, 2))
        holes = outside(tensor_extents(index, packed), front, index.file_bytes)
        head_bytes = len(_head(0, 0))
        body = index_text(index)
        if head_bytes + len(body) > front:
            raise CheckpointError(f"{path}: an index of {len(body)} bytes does not fit into a front of {front}")
        body = body.ljust(front - head_bytes, b"\0")
        head = _head(_xxh3(file.fileno(), body, holes), front)
        file.seek(0)
        file.write(head + body)


def read_front(descriptor: int) -> Front:
    """The front of a file, nothing of which was checked. Raises CheckpointError, OSError."""
    head = os.pread(descriptor, len(_head(0, 0)), 0)
    size = _size_in(head)
    if not len(head) < size <= LARGEST_BYTES:
        raise CheckpointError("is no checkpoint of ours, or not a complete one: it does not begin as they do")
    return Front(size, head, os.pread(descriptor, size - len(head), len(head)))


def check(descriptor: int, front: Front, index: Index, extents: np.ndarray) -> None:
    """Every byte outside the extents, those of tensors, is as it was written. Raises CheckpointError, OSError."""
    holes = outside(extents, front.bytes, index.file_bytes)
    _check_size(holes, index)
    now = _xxh3(descriptor, front.body, holes)
    if front.head != _head(now, front.bytes):
        raise CheckpointError(f"the index, tables or attributes of the file are damaged (xxh3 now {now:016x})")


def _check_size(holes: list[Extent], index: Index) -> None:
    """A file whose tables are endless, as a sparse one may be at no cost, would keep us reading."""
    found, blocks = sum(length for _, length in holes), index.blocks
    allowed = _TABLES_BYTES + _TABLES_BYTES_EACH * len(index.datasets) + _TABLES_BYTES_BLOCK * blocks
    if found > allowed:
        raise CheckpointError(
            f"has {found:,} bytes that are no tensor's; {len(index.datasets)} datasets of {blocks} blocks need fewer "
            f"than {allowed:,}"
        )


def _head(xxh3: int, front: int) -> bytes:
    return b"hpcllm checkpoint 2: index of %08d bytes, xxh3 %016x\n" % (front, xxh3)


def _size_in(head: bytes) -> int:
    words = head.split()
    return int(words[5]) if len(words) == 9 and words[5].isdigit() else 0


def _xxh3(descriptor: int, body: bytes, holes: list[Extent]) -> int:
    state = xxhash.xxh3_64(body)
    for piece in _pieces(descriptor, holes):
        state.update(piece)
    return state.intdigest()


def _pieces(descriptor: int, holes: list[Extent]) -> Iterator[bytes]:
    for offset, length in holes:
        end = offset + length
        while offset < end and (piece := os.pread(descriptor, min(end - offset, _PIECE_BYTES), offset)):
            yield piece
            offset += len(piece)
