"""What writer and reader agree on: element types, names, the table of checksums. Pure but for numpy.

the front            an index of all that follows, under a checksum: guard.py, index.py
/model/<name>, ...   contiguous datasets, little-endian; in an archive in chunks, which are blocks, packed
/checksums           uint64: XXH3 (64 bits) of each block (blocks.py) of each dataset, in the order of their names
/packed              uint64 (blocks, 3), in an archive only: offset, bytes and XXH3 of each block as it is stored
/@complete           true; the last attribute to be written

XXH3 by the package xxhash: 31 GB/s on a core here, three times a copy in memory, where zlib's crc32 makes 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from hpcllm.checkpoint.blocks import block, block_count, block_shape
from hpcllm.checkpoint.slabs import Slab
from hpcllm.errors import CheckpointError

Attribute = str | int | float | bool

# a run's tensors, by kind: <kind>/<parameter>; and its tokenizer
MODEL, MASTER = "model", "optimizer/master"  # master: fp32, where it is not the model itself
EXP_AVG, EXP_AVG_SQ = "optimizer/exp_avg", "optimizer/exp_avg_sq"
TOKENIZER = "tokenizer"
CHECKSUMS, PACKED = "checksums", "packed"
COMPLETE = "complete"
DTYPE_ATTRIBUTE = "dtype"  # on a dataset whose element type HDF5 does not have

# name -> how it is stored; HDF5 before 2.0 has no bfloat16, so its bits rest in a uint16
STORED_AS = {
    **{f"float{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"int{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    "bfloat16": np.dtype("<u2"),
}
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class DatasetSpec:
    """Global shape and element type (a key of STORED_AS) of a dataset."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        return STORED_AS[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of every block but the last ones."""
        return block_shape(self.shape, self.item_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Of such a block, and of every chunk of an archive."""
        return math.prod(self.block_shape) * self.item_bytes

    @property
    def blocks(self) -> int:
        return block_count(self.shape, self.item_bytes)

    def block(self, dataset: str, index: int) -> Slab:
        """Block `index` of the dataset that has this spec."""
        return block(dataset, self.shape, self.item_bytes, index)


def check_spec(name: str, spec: DatasetSpec) -> None:
    """Raises CheckpointError for a name or type that a file cannot have."""
    is_path = all(part not in ("", ".", "..") for part in name.split("/")) and name.isprintable()
    if not is_path or name in (CHECKSUMS, PACKED) or len(name) > _LONGEST_NAME:
        raise CheckpointError(
            f"{name[:80]!r} cannot name a dataset; valid: up to {_LONGEST_NAME} letters, '/' between parts, as in "
            "'model/weight'"
        )
    if spec.dtype not in STORED_AS:
        raise CheckpointError(f"{name} has the unknown type {spec.dtype!r}; valid: {', '.join(STORED_AS)}")
    if math.prod(spec.shape) < 1 or min(spec.shape, default=1) < 1:
        raise CheckpointError(f"{name} of shape {spec.shape} has no elements; leave it out")


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def as_float64(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as numbers, in a new array. dtype: a key of STORED_AS."""
    if dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN of any kind may be what a caller is to report
        return values.astype(np.float64)


def checksum(data: bytes | memoryview) -> int:
    """Releases the GIL."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_ranges(specs: Mapping[str, DatasetSpec]) -> dict[str, range]:
    """Dataset -> where the checksums of its blocks lie in /checksums."""
    ranges, first = {}, 0
    for name in sorted(specs):
        ranges[name] = range(first, first + specs[name].blocks)
        first += specs[name].blocks
    return ranges
