"""Header of a checkpoint or token store: an index of the file, and a checksum over every byte that is not a tensor's.

    | header                         | HDF5 tables | /model/a | HDF5 tables | /model/b | HDF5 tables, /checksums |
    | xxh3, index as JSON, 0 0 0 ...   ^^^^^^^^^^^              ^^^^^^^^^^^              ^^^^^^^^^^^^^^^^^^^^^^^^
      covers itself and everything marked ^; each block of a tensor has its own in /checksums

    {"file_bytes": 23104,
     "tables": {"checksums": 20480},                          where /checksums begins, and in an archive /packed
     "datasets": {"model/bias": ["float32", [5], 8192],       type, shape, byte at which it begins
                  "model/weight": ["bfloat16", [37, 11]]},    in an archive /packed says where
     "attributes": {"run/step": 3}}

HDF5 leaves such a "user block" to the application, and its tools skip it. It is written last, so a file that carries it
is complete, and every bit of the file is under exactly one checksum.

Training reads names, shapes and offsets from the index; the HDF5 tables are for everyone else. The HDF5 library never
gets a file to parse that this process did not make, because tables made to harm crash it or keep it busy for ever.
The checksum guards against accidents. Against malice every value of the index is checked for type and range here, and
directory.py checks that all extents are inside the file and no two share a byte.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hpcllm.checkpoint.layout import CHECKSUMS, PACKED, Attribute, DatasetSpec, check_spec
from hpcllm.errors import CheckpointError

Extent = tuple[int, int]  # offset, length in bytes

LARGEST_OFFSET = 2**63 - 1
LARGEST_HEADER_BYTES = 1 << 24  # more than 100,000 datasets; no more is ever parsed
_MOST_DIMS = 32  # HDF5's limit
_MOST_BLOCKS = 1 << 24  # 64 TiB; their checksums are in the memory of every rank
_PIECE_BYTES = 1 << 23
_TABLES_BYTES = 1 << 24  # allowed for everything that is not a tensor's,
_TABLES_BYTES_EACH = 1 << 14  # with so much for each dataset, its page alignment included,
_TABLES_BYTES_BLOCK = 1 << 8  # and so much for each block


@dataclass(frozen=True)
class Index:
    """Content of a file without the tensors' values. Offsets count from the start of the file, in bytes."""

    datasets: Mapping[str, DatasetSpec]
    attributes: Mapping[str, Attribute]
    offsets: Mapping[str, int] = field(default_factory=dict)  # dataset -> first byte; empty in an archive
    tables: Mapping[str, int] = field(default_factory=dict)  # CHECKSUMS, in an archive PACKED too -> offset
    file_bytes: int = 0

    @property
    def blocks(self) -> int:
        return sum(spec.blocks for spec in self.datasets.values())

    def tensor_extents(self, packed: np.ndarray | None) -> np.ndarray:
        """(n, 2) uint64: offset and bytes of each stretch of tensor data. packed: an archive's table (blocks, 3)."""
        if packed is not None:
            return packed[:, :2]
        plain = [(offset, self.datasets[name].bytes) for name, offset in self.offsets.items()]
        return np.array(plain, dtype=np.uint64).reshape(-1, 2)


class Header(NamedTuple):
    """The first bytes of a file: a line of text, then the index, filled up with zeros."""

    size: int
    line: bytes
    body: bytes


def index_text(index: Index) -> bytes:
    """The index as JSON. Raises CheckpointError for a name, type or attribute that a checkpoint cannot have."""
    _check_entries(index)
    places = {name: [index.offsets[name]] if name in index.offsets else [] for name in index.datasets}
    fields = {
        "file_bytes": index.file_bytes,
        "tables": dict(index.tables),
        "datasets": {n: [spec.dtype, list(spec.shape), *places[n]] for n, spec in sorted(index.datasets.items())},
        "attributes": dict(index.attributes),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def parse_index(text: bytes) -> Index:
    """The inverse of index_text. Raises CheckpointError, and nothing else, whatever the text is."""
    try:
        fields = json.loads(text)
        datasets, offsets = _parse_datasets(_of_type(dict, "the datasets", fields["datasets"]))
        attributes = _of_type(dict, "the attributes", fields["attributes"])
        tables = {key: _int_from(0, key, n) for key, n in _of_type(dict, "the tables", fields["tables"]).items()}
        index = Index(datasets, attributes, offsets, tables, _int_from(0, "file_bytes", fields["file_bytes"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its index is damaged ({type(error).__name__}: {str(error)[:200]})") from error
    _check_entries(index)
    if CHECKSUMS not in tables or not tables.keys() <= {CHECKSUMS, PACKED}:
        raise CheckpointError(f"has the tables {sorted(tables)[:3]}; valid: {CHECKSUMS}, and {PACKED}")
    if offsets.keys() != (set() if PACKED in tables else datasets.keys()):
        raise CheckpointError("does not say of each dataset where it lies")
    return index


def header_bytes(index: Index) -> int:
    """Size of the header that `index` fits into, wherever in the file its datasets will lie.

    A power of two, as HDF5 wants it, from 4096 up. Raises CheckpointError.
    """
    offsets = dict.fromkeys(index.datasets, LARGEST_OFFSET)  # no index of these datasets has a longer text
    tables = dict.fromkeys((CHECKSUMS, PACKED), LARGEST_OFFSET)
    longest = Index(index.datasets, index.attributes, offsets, tables, LARGEST_OFFSET)
    needed = len(_line(0, 0)) + len(index_text(longest))
    if needed > LARGEST_HEADER_BYTES:
        raise CheckpointError(
            f"{len(index.datasets)} datasets and {len(index.attributes)} attributes need an index of {needed:,} bytes; "
            f"valid: up to {LARGEST_HEADER_BYTES:,}"
        )
    return max(4096, 1 << (needed - 1).bit_length())


def gaps_between(extents: np.ndarray, first: int, file_bytes: int) -> list[Extent]:
    """The parts of first..file_bytes outside (n, 2) uint64 extents.

    Raises CheckpointError where extents overlap or leave the file.
    """
    offsets, lengths = extents[extents[:, 0].argsort(kind="stable")].T
    size = np.uint64(file_bytes)
    before = np.append(np.uint64(first), offsets + lengths)  # a sum that wraps belongs to an extent beyond the end
    wrong = (lengths > size) | (offsets > size - np.minimum(lengths, size)) | (offsets < before[:-1])
    if wrong.any():
        offset, length = int(offsets[wrong.argmax()]), int(lengths[wrong.argmax()])
        raise CheckpointError(
            f"bytes {offset}..{offset + length} of a dataset overlap another one or leave {first}..{file_bytes}"
        )
    after = np.append(offsets, size)
    gaps = after > before
    return list(zip(before[gaps].tolist(), (after - before)[gaps].tolist(), strict=True))


def write_header(path: Path, index: Index, size: int, packed: np.ndarray | None = None) -> None:
    """Write the header of a file in which everything else is in place. packed: an archive's table.

    size: in bytes, from header_bytes before there were offsets. Raises OSError, CheckpointError.
    """
    with path.open("r+b") as file:
        index = dataclasses.replace(index, file_bytes=file.seek(0, 2))
        gaps = gaps_between(index.tensor_extents(packed), size, index.file_bytes)
        body, room = index_text(index), size - len(_line(0, 0))
        if len(body) > room:
            raise CheckpointError(f"{path}: an index of {len(body)} bytes does not fit into a header of {size}")
        body = body.ljust(room, b"\0")
        file.seek(0)
        file.write(_line(_xxh3(file.fileno(), body, gaps), size) + body)


def read_header(descriptor: int) -> Header:
    """The header of a file, unchecked but for its size. Raises CheckpointError, OSError."""
    line = os.pread(descriptor, len(_line(0, 0)), 0)
    words = line.split()
    size = int(words[5]) if len(words) == 9 and words[5].isdigit() else 0
    if not len(line) < size <= LARGEST_HEADER_BYTES:
        raise CheckpointError("is no file of ours, or not a complete one: it does not begin as they do")
    return Header(size, line, os.pread(descriptor, size - len(line), len(line)))


def check_header(descriptor: int, header: Header, index: Index, extents: np.ndarray) -> None:
    """Verify the checksum of every byte outside the extents, those of tensors. Raises CheckpointError, OSError."""
    gaps = gaps_between(extents, header.size, index.file_bytes)
    found, blocks = sum(length for _, length in gaps), index.blocks
    allowed = _TABLES_BYTES + _TABLES_BYTES_EACH * len(index.datasets) + _TABLES_BYTES_BLOCK * blocks
    if found > allowed:  # endless tables, which a sparse file has at no cost, would keep us reading
        raise CheckpointError(
            f"has {found:,} bytes that are no tensor's; {len(index.datasets)} datasets of {blocks} blocks need fewer "
            f"than {allowed:,}"
        )
    now = _xxh3(descriptor, header.body, gaps)
    if header.line != _line(now, header.size):
        raise CheckpointError(f"the index, tables or attributes of the file are damaged (xxh3 now {now:016x})")


def _parse_datasets(entries: dict[str, Any]) -> tuple[dict[str, DatasetSpec], dict[str, int]]:
    datasets, offsets = {}, {}
    for name, entry in entries.items():
        dtype, shape, *place = _of_type(list, name, entry)
        if len(_of_type(list, name, shape)) > _MOST_DIMS or len(place) > 1:
            raise CheckpointError(f"{name} has {len(shape)} dimensions; valid: up to {_MOST_DIMS}")
        datasets[name] = DatasetSpec(tuple(_int_from(1, name, n) for n in shape), _of_type(str, name, dtype))
        if place:
            offsets[name] = _int_from(0, name, place[0])
    return datasets, offsets


def _check_entries(index: Index) -> None:
    for name, spec in index.datasets.items():
        check_spec(name, spec)
        if spec.bytes > LARGEST_OFFSET:
            raise CheckpointError(f"{name} has the shape {spec.shape}; valid: fewer than 2^63 bytes")
    attributes: Mapping[str, object] = index.attributes  # from a file, not what their type says
    for key, value in attributes.items():
        if not isinstance(value, str | int | float | bool):
            kind = type(value).__name__
            raise CheckpointError(f"attribute {key[:80]!r} is a {kind}; valid: one text, number or boolean")
        try:
            f"{key}{value}".encode()
        except ValueError as error:  # half a character, or a number of thousands of digits
            raise CheckpointError(f"attribute {key[:80]!r} cannot be written as text") from error
    if index.blocks > _MOST_BLOCKS:
        raise CheckpointError(f"has {index.blocks:,} blocks; valid: up to {_MOST_BLOCKS:,}")


def _of_type(kind: type, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"its index is damaged: {name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _int_from(least: int, name: str, value: Any) -> int:
    if type(value) is not int or not least <= value <= LARGEST_OFFSET:
        raise CheckpointError(f"its index is damaged: {name} has {str(value)[:40]!r}; valid: {least} to 2^63 - 1")
    return value


def _line(xxh3: int, size: int) -> bytes:
    return b"hpcllm file 3: index of %08d bytes, xxh3 %016x\n" % (size, xxh3)


def _xxh3(descriptor: int, body: bytes, gaps: list[Extent]) -> int:
    state = xxhash.xxh3_64(body)
    for piece in _pieces(descriptor, gaps):
        state.update(piece)
    return state.intdigest()


def _pieces(descriptor: int, gaps: list[Extent]) -> Iterator[bytes]:
    for offset, length in gaps:
        end = offset + length
        while offset < end and (piece := os.pread(descriptor, min(end - offset, _PIECE_BYTES), offset)):
            yield piece
            offset += len(piece)
