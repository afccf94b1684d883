"""What a checkpoint file says that it holds, read by one process and believed only after it was checked.

    guard block -> tables as they were written -> each object of a kind that we write -> extents disjoint and inside
    the file -> every element of every dataset under exactly one checksum

A file may come from anyone. What our writer would not have made (links that lead elsewhere, chunks, filters, other
element types) is refused by name, and no exception of the HDF5 library passes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcllm.checkpoint import guard
from hpcllm.checkpoint.layout import (
    CHECKSUMS,
    COMPLETE,
    DTYPE_ATTRIBUTE,
    STORED_AS,
    Attribute,
    Checksums,
    DatasetSpec,
    from_records,
    record_type,
)
from hpcllm.checkpoint.slabs import Slab, fits, uncovered
from hpcllm.errors import CheckpointError

_DEPTH = 16  # groups within groups; ours use two
_NAMES = {stored: name for name, stored in STORED_AS.items() if name != "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """A dataset of the file: its global shape and type, and the byte at which it begins."""

    spec: DatasetSpec
    offset: int
    checksums: tuple[tuple[Slab, int], ...]


@dataclass(frozen=True)
class Directory:
    """All of a file but the tensors."""

    file_bytes: int
    datasets: dict[str, Stored]
    attributes: dict[str, Attribute]


def read_directory(path: Path) -> Directory:
    """Read and check everything but the tensors. Not collective. Raises CheckpointError."""
    room = guard.check(path)
    try:
        file_bytes = path.stat().st_size
        with h5py.File(path, "r", locking=False) as file:
            objects = dict(_walk(file, "", 0, set()))
            attributes = dict(_attributes(objects))
            table = objects.pop(CHECKSUMS, None)
            specs = {name: _spec(name, item) for name, item in objects.items() if isinstance(item, h5py.Dataset)}
            offsets = {name: objects[name].id.get_offset() for name in specs}
            checksums = _checksums(table, specs, file_bytes)
        return _checked(file_bytes, room, specs, offsets, checksums, attributes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # whatever the library makes of a file that it did not write
        raise CheckpointError(f"{path}: HDF5 cannot read its tables: {type(error).__name__}: {error}") from error


def _walk(group: h5py.Group, prefix: str, depth: int, seen: set[int]) -> Iterator[tuple[str, h5py.HLObject]]:
    """Every group and dataset with its path. `seen` holds addresses: what is reached twice could be a cycle."""
    yield prefix, group
    if depth == _DEPTH:
        raise CheckpointError(f"group {prefix!r} is {depth} groups deep; valid: fewer")
    for name in group:
        path = f"{prefix}/{name}" if prefix else name
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            raise CheckpointError(f"{path!r} is a {type(link).__name__}; a checkpoint has no links to elsewhere")
        item = group[name]
        if not isinstance(item, h5py.Group | h5py.Dataset):
            raise CheckpointError(f"{path!r} is a {type(item).__name__}; valid: groups and datasets")
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            raise CheckpointError(f"{path!r} is a second name of another object; valid: one name for each")
        seen.add(address)
        yield from _walk(item, path, depth + 1, seen) if isinstance(item, h5py.Group) else [(path, item)]


def _attributes(objects: dict[str, h5py.HLObject]) -> Iterator[tuple[str, Attribute]]:
    for path, item in objects.items():
        if isinstance(item, h5py.Group):
            for name in item.attrs:
                key = f"{path}/{name}" if path else name
                yield key, _value(key, item.attrs, name)


def _value(key: str, attributes: Any, name: str) -> Attribute:
    kind, shape = attributes.get_id(name).dtype, attributes.get_id(name).shape
    is_text = h5py.check_string_dtype(kind) is not None
    if shape != () or not (is_text or kind.kind in "iufb"):
        raise CheckpointError(f"attribute {key!r} of type {kind} and shape {shape}; valid: one text, number or boolean")
    value = attributes[name]
    if isinstance(value, bytes):
        return value.decode()
    plain: Attribute = value if isinstance(value, str) else value.item()
    return plain


def _spec(name: str, item: h5py.Dataset) -> DatasetSpec:
    """The spec of a dataset of the one kind that we write. Raises CheckpointError."""
    creation = item.id.get_create_plist()
    if creation.get_layout() != h5py.h5d.CONTIGUOUS or creation.get_nfilters() or creation.get_external_count():
        raise CheckpointError(f"{name!r} is chunked, compressed, compact, virtual or stored elsewhere, not contiguous")
    if item.dtype not in _NAMES or item.shape is None:
        raise CheckpointError(f"{name!r} has the type {item.dtype}; valid: {', '.join(STORED_AS)}")
    dtype = _NAMES[item.dtype]
    if DTYPE_ATTRIBUTE in item.attrs:
        dtype = str(_value(f"{name}@{DTYPE_ATTRIBUTE}", item.attrs, DTYPE_ATTRIBUTE))
        if dtype not in STORED_AS or STORED_AS[dtype] != item.dtype:
            raise CheckpointError(f"{name!r} is said to be {dtype!r}, but is stored as {item.dtype}")
    spec = DatasetSpec(tuple(int(n) for n in item.shape), dtype)
    if spec.bytes < 1 or item.id.get_storage_size() != spec.bytes or item.id.get_offset() is None:
        raise CheckpointError(f"{name!r} {spec.shape} {dtype} has {item.id.get_storage_size()} bytes in the file")
    return spec


def _checksums(table: h5py.HLObject | None, specs: dict[str, DatasetSpec], file_bytes: int) -> Checksums:
    if not isinstance(table, h5py.Dataset) or table.ndim != 1 or table.dtype.names is None:
        raise CheckpointError(f"has no table /{CHECKSUMS}, so nothing in it can be verified")
    kind = table.dtype
    axes = kind["start"].shape[0] if "start" in kind.names and kind["start"].shape else 0
    if kind != record_type(kind[0].itemsize, axes):
        raise CheckpointError(f"/{CHECKSUMS} has records of {kind}")
    if table.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS or table.size * kind.itemsize > file_bytes:
        raise CheckpointError(f"/{CHECKSUMS} claims {table.size} records, more than the file can hold")
    records: np.ndarray = table[()]
    return from_records(records, {name: len(spec.shape) for name, spec in specs.items()})


def _checked(
    file_bytes: int,
    room: guard.Room,
    specs: dict[str, DatasetSpec],
    offsets: dict[str, int],
    checksums: Checksums,
    attributes: dict[str, Attribute],
) -> Directory:
    """The law of the format: complete, every byte of the file and every element under exactly one checksum."""
    if attributes.pop(COMPLETE, None) is not True:
        raise CheckpointError("is not marked as complete; its writer was stopped")
    by_dataset: dict[str, list[tuple[Slab, int]]] = {name: [] for name in specs}
    for slab, crc in checksums:
        by_dataset[slab.dataset].append((slab, crc))
    for name, spec in specs.items():
        _check_cover(name, spec, [slab for slab, _ in by_dataset[name]])
    extents = [(offsets[name], spec.bytes) for name, spec in specs.items()]
    if guard.outside(extents, room.first, file_bytes) != room.holes:
        raise CheckpointError("its datasets do not lie where the guard block at its front leaves room")
    datasets = {name: Stored(spec, offsets[name], tuple(by_dataset[name])) for name, spec in specs.items()}
    return Directory(file_bytes, datasets, attributes)


def _check_cover(name: str, spec: DatasetSpec, slabs: list[Slab]) -> None:
    wrong = [slab for slab in slabs if not fits(slab, spec.shape)]
    fault = f"{wrong[0]} is not inside it" if wrong else uncovered(spec.shape, slabs)
    if fault:
        raise CheckpointError(f"the checksums of {name} {spec.shape} do not cover it: {fault}")
