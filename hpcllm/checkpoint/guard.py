"""The first block of a checkpoint: a checksum over every byte of the file that is not tensor data.

    | guard block            | HDF5 header | /model/a | hole | /model/b | HDF5 tables, attributes, /checksums |
    | crc32, holes, 0 0 0 ...  ^^^^^^^^^^^             ^^^^              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ |
      covers itself and everything marked ^; each slab of tensor data has its own crc32 in /checksums

HDF5 leaves such a "user block" to the application and its tools skip it. It is written last, so a file that carries it
is complete, and it is checked before HDF5 parses anything: every bit of the file is under exactly one checksum, and a
damaged table never reaches the library. It guards against accidents, not against malice.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpcllm.errors import CheckpointError

Extent = tuple[int, int]  # offset, length in bytes


@dataclass(frozen=True)
class Room:
    """Tensor data lies from byte `first` on, and not in the holes."""

    first: int
    holes: list[Extent]


_LARGEST_BYTES = 1 << 26
_PIECE_BYTES = 1 << 23


def block_bytes(datasets: int) -> int:
    """Size of the block for a file of so many datasets: a power of two from 4096 up, as HDF5 wants it.

    There is at most one hole before each dataset and one after the last, each written in under 48 characters.
    """
    return 1 << (2048 + 48 * (datasets + 1) - 1).bit_length()


def outside(data: Iterable[Extent], first: int, file_bytes: int) -> list[Extent]:
    """What `data` leaves of first..file_bytes. Raises CheckpointError where extents overlap or leave the file."""
    holes, position = [], first
    for offset, length in sorted(data):
        if offset < position or length < 0 or offset + length > file_bytes:
            raise CheckpointError(
                f"bytes {offset}..{offset + length} of a dataset overlap another one or leave {first}..{file_bytes}"
            )
        if offset > position:
            holes.append((position, offset - position))
        position = offset + length
    return [*holes, (position, file_bytes - position)] if position < file_bytes else holes


def seal(path: Path, data: Iterable[Extent], size: int) -> None:
    """Write the block of `size` bytes at the front of `path`; `data` are the extents of the datasets.

    Raises OSError, and CheckpointError if datasets overlap.
    """
    with path.open("r+b") as file:
        file_bytes = file.seek(0, 2)
        holes = outside(data, size, file_bytes)
        body = json.dumps({"file_bytes": file_bytes, "holes": holes}, separators=(",", ":")).encode()
        head_bytes = len(_head(0, size))
        if head_bytes + len(body) > size:
            raise CheckpointError(f"{path}: {len(holes)} holes do not fit into a guard block of {size} bytes")
        body = body.ljust(size - head_bytes, b"\0")
        head = _head(_crc(file, body, holes), size)
        file.seek(0)
        file.write(head + body)


def check(path: Path) -> Room:
    """What the block says of the file, once every byte under it is found as written. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return _checked(file, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _checked(file: BinaryIO, path: Path) -> Room:
    head = file.read(len(_head(0, 0)))
    size = _size_in(head)
    if not 0 < size <= _LARGEST_BYTES:
        raise CheckpointError(f"{path} is not a complete checkpoint: it does not begin with a guard block of hpcllm")
    body = file.read(size - len(head))
    file_bytes = file.seek(0, 2)
    try:
        stated_bytes, holes = _parsed(body)
        crc = _crc(file, body, holes)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: the guard block at its front is damaged ({error})") from error
    if stated_bytes != file_bytes:
        raise CheckpointError(
            f"{path}: has {file_bytes} bytes, but {stated_bytes} were written; it was cut or added to"
        )
    if head != _head(crc, size):
        raise CheckpointError(f"{path}: the tables or attributes of the file are damaged (crc32 now {crc:08x})")
    return Room(size, holes)


def _head(crc: int, size: int) -> bytes:
    return b"hpcllm checkpoint 1: guard block of %08d bytes, crc32 %08x\n" % (size, crc)


def _size_in(head: bytes) -> int:
    words = head.split()
    return int(words[6]) if len(words) == 10 and words[6].isdigit() else 0


def _parsed(body: bytes) -> tuple[int, list[Extent]]:
    fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
    holes = [(int(offset), int(length)) for offset, length in fields["holes"]]
    if any(offset < 0 or length < 0 for offset, length in holes):
        raise ValueError("a hole is not in the file")
    return int(fields["file_bytes"]), holes


def _crc(file: BinaryIO, body: bytes, holes: list[Extent]) -> int:
    crc = zlib.crc32(body)
    for offset, length in holes:
        file.seek(offset)
        while length > 0 and (piece := file.read(min(length, _PIECE_BYTES))):
            crc = zlib.crc32(piece, crc)
            length -= len(piece)
    return crc
