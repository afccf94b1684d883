"""The index of a checkpoint: its datasets, where they lie, its attributes; as text, and checked on the way back. Pure.

    {"file_bytes": 23104,
     "tables": {"checksums": 20480},                          where /checksums begins, and in an archive /packed
     "datasets": {"model/bias": ["float32", [5], 8192],       type, shape, byte at which it begins
                  "model/weight": ["bfloat16", [37, 11]]},    in an archive /packed says where
     "attributes": {"run/step": 3}}

A text may come from anyone. What is read from it has the types and ranges it should have; that the places are inside
the file, and no two of them share a byte, directory.py finds out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcllm.checkpoint.layout import CHECKSUMS, PACKED, Attribute, DatasetSpec, check_spec
from hpcllm.errors import CheckpointError

LARGEST_OFFSET = 2**63 - 1
_MOST_DIMS = 32  # of HDF5
_MOST_BLOCKS = 1 << 24  # 64 TiB; their checksums are in the memory of every rank


@dataclass(frozen=True)
class Index:
    """What a file holds, the tensors' values aside. Offsets count from the front of the file, in bytes."""

    datasets: Mapping[str, DatasetSpec]
    attributes: Mapping[str, Attribute]
    offsets: Mapping[str, int] = field(default_factory=dict)  # of the datasets; in an archive empty
    tables: Mapping[str, int] = field(default_factory=dict)  # CHECKSUMS, in an archive PACKED too -> offset
    file_bytes: int = 0

    @property
    def blocks(self) -> int:
        return sum(spec.blocks for spec in self.datasets.values())

    def placed_last(self) -> Index:
        """The same with the longest offsets there can be: no placed index of these datasets has a longer text."""
        offsets = dict.fromkeys(self.datasets, LARGEST_OFFSET)
        tables = dict.fromkeys((CHECKSUMS, PACKED), LARGEST_OFFSET)
        return Index(self.datasets, self.attributes, offsets, tables, LARGEST_OFFSET)


def index_text(index: Index) -> bytes:
    """As JSON. Raises CheckpointError for a name, type or attribute that a checkpoint cannot have."""
    for name, spec in index.datasets.items():
        check_spec(name, spec)
    for key, value in index.attributes.items():
        _check_attribute(key, value)
    _check_blocks(index)
    fields = {
        "file_bytes": index.file_bytes,
        "tables": dict(index.tables),
        "datasets": {name: _entry(spec, index.offsets.get(name)) for name, spec in sorted(index.datasets.items())},
        "attributes": dict(index.attributes),
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def parse_index(text: bytes) -> Index:
    """The inverse of index_text. Raises CheckpointError, and nothing else, whatever the text is."""
    try:
        fields = json.loads(text)
        datasets, offsets = _parse_datasets(_of_type(dict, "the datasets", fields["datasets"]))
        attributes = _of_type(dict, "the attributes", fields["attributes"])
        tables = {key: _whole(key, n, 0) for key, n in _of_type(dict, "the tables", fields["tables"]).items()}
        index = Index(datasets, attributes, offsets, tables, _whole("file_bytes", fields["file_bytes"], 0))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its index is damaged ({type(error).__name__}: {str(error)[:200]})") from error
    _check_whole(index)
    return index


def _entry(spec: DatasetSpec, offset: int | None) -> list[Any]:
    return [spec.dtype, list(spec.shape), *([] if offset is None else [offset])]


def _parse_datasets(entries: dict[str, Any]) -> tuple[dict[str, DatasetSpec], dict[str, int]]:
    datasets, offsets = {}, {}
    for name, entry in entries.items():
        dtype, shape, *place = _of_type(list, name, entry)
        if len(_of_type(list, name, shape)) > _MOST_DIMS or len(place) > 1:
            raise CheckpointError(f"{name} has {len(shape)} dimensions; valid: up to {_MOST_DIMS}")
        datasets[name] = DatasetSpec(tuple(_whole(name, n, 1) for n in shape), _of_type(str, name, dtype))
        if place:
            offsets[name] = _whole(name, place[0], 0)
    return datasets, offsets


def _check_whole(index: Index) -> None:
    for name, spec in index.datasets.items():
        check_spec(name, spec)
        if spec.bytes > LARGEST_OFFSET:
            raise CheckpointError(f"{name} has the shape {spec.shape}; valid: fewer than 2^63 bytes")
    for key, value in index.attributes.items():
        _check_attribute(key, value)
    if CHECKSUMS not in index.tables or not index.tables.keys() <= {CHECKSUMS, PACKED}:
        raise CheckpointError(f"has the tables {sorted(index.tables)[:3]}; valid: {CHECKSUMS}, and {PACKED}")
    placed = set() if PACKED in index.tables else index.datasets.keys()
    if index.offsets.keys() != placed:
        raise CheckpointError("does not say of each dataset where it lies")
    _check_blocks(index)


def _check_blocks(index: Index) -> None:
    if index.blocks > _MOST_BLOCKS:
        raise CheckpointError(f"has {index.blocks:,} blocks; valid: up to {_MOST_BLOCKS:,}")


def _check_attribute(key: str, value: object) -> None:
    if not isinstance(value, str | int | float | bool):
        raise CheckpointError(f"attribute {key[:80]!r} is a {type(value).__name__}; valid: one text, number or boolean")
    try:
        f"{key}{value}".encode()
    except ValueError as error:  # half a character, or a number of thousands of digits
        raise CheckpointError(f"attribute {key[:80]!r} cannot be written as text") from error


def _of_type(kind: type, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"its index is damaged: {name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _whole(name: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= LARGEST_OFFSET:
        raise CheckpointError(f"its index is damaged: {name} has {str(value)[:40]!r}; valid: {least} to 2^63 - 1")
    return value
