"""What writer and reader agree on: element types, names, the table of checksums. Pure but for numpy.

/model/<name>, ...   contiguous datasets, little-endian
/checksums           one record a slab as it was written: dataset, start, shape, crc32 of its bytes in C order
/@complete           true; the last attribute to be written
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hpcllm.checkpoint.slabs import Slab
from hpcllm.errors import CheckpointError

Attribute = str | int | float | bool
Checksums = list[tuple[Slab, int]]

# a run's tensors, by kind: <kind>/<parameter>; and its tokenizer
MODEL, MASTER = "model", "optimizer/master"  # master: fp32, where it is not the model itself
EXP_AVG, EXP_AVG_SQ = "optimizer/exp_avg", "optimizer/exp_avg_sq"
TOKENIZER = "tokenizer"
CHECKSUMS = "checksums"
COMPLETE = "complete"
DTYPE_ATTRIBUTE = "dtype"  # on a dataset whose element type HDF5 does not have

# name -> how it is stored; HDF5 before 2.0 has no bfloat16, so its bits rest in a uint16
STORED_AS = {
    **{f"float{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"int{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    "bfloat16": np.dtype("<u2"),
}


@dataclass(frozen=True)
class DatasetSpec:
    """Global shape and element type (a key of STORED_AS) of a dataset."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * STORED_AS[self.dtype].itemsize


def check_spec(name: str, spec: DatasetSpec) -> None:
    """Raises CheckpointError for a name or type that a file cannot have."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or name == CHECKSUMS:
        raise CheckpointError(f"{name!r} cannot name a dataset; valid: parts with a '/' between, as in 'model/weight'")
    if spec.dtype not in STORED_AS:
        raise CheckpointError(f"{name} has the unknown type {spec.dtype!r}; valid: {', '.join(STORED_AS)}")
    if math.prod(spec.shape) < 1 or min(spec.shape, default=1) < 1:
        raise CheckpointError(f"{name} of shape {spec.shape} has no elements; leave it out")


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def record_type(name_bytes: int, axes: int) -> np.dtype:
    fields = [("dataset", f"S{name_bytes}"), ("start", "<u8", (axes,)), ("shape", "<u8", (axes,)), ("crc32", "<u4")]
    return np.dtype(fields)


def to_records(checksums: Checksums) -> np.ndarray:
    """One fixed-length record a slab; axes that a dataset does not have are 0."""
    axes = max((len(slab.shape) for slab, _ in checksums), default=0) or 1
    name_bytes = max((len(slab.dataset.encode()) for slab, _ in checksums), default=1)
    records = np.zeros(len(checksums), dtype=record_type(name_bytes, axes))
    for record, (slab, crc) in zip(records, checksums, strict=True):
        record["dataset"], record["crc32"] = slab.dataset.encode(), crc
        record["start"][: len(slab.start)] = slab.start
        record["shape"][: len(slab.shape)] = slab.shape
    return records


def from_records(records: np.ndarray, axes_of: dict[str, int]) -> Checksums:
    """The inverse; `axes_of` each known dataset. Raises CheckpointError for a record that names another one."""
    return [(_slab(record, axes_of), int(record["crc32"])) for record in records]


def _slab(record: np.void, axes_of: dict[str, int]) -> Slab:
    name = record["dataset"].decode(errors="replace")
    if name not in axes_of:
        raise CheckpointError(f"a checksum is of {name!r}, which is not a dataset of the file")
    return Slab(name, _axes(record["start"], axes_of[name]), _axes(record["shape"], axes_of[name]))


def _axes(values: Iterable[int], axes: int) -> tuple[int, ...]:
    return tuple(int(v) for v in values)[:axes]
