"""Layout of the data in a checkpoint: names, element types, blocks, checksums, packed chunks. Pure but for numpy.

header               an index of all that follows, under a checksum: header.py
/model/<name>, ...   contiguous datasets, little-endian; in an archive in chunks, which are blocks, packed
/checksums           uint64: XXH3 (64 bits) of each block of each dataset, in the order of their names
/packed              uint64 (blocks, 3), in an archive only: offset, bytes and XXH3 of each block as it is stored
/@complete           true; the last attribute to be written

A dataset is written, read and checksummed block by block:

    (10, 6) of 4 bytes, blocks of at most 96 bytes      block 0   rows 0-3      bytes   0 ..  96 of the dataset
                                                        block 1   rows 4-7      bytes  96 .. 192
                                                        block 2   rows 8-9      bytes 192 .. 240

A block is a box and, whatever the tensor's shape, one stretch of the file: whole rows, or a part of a row where a row
is larger than a block. Blocks do not depend on who wrote a file, so any layout can check what any other wrote.

In an archive each block is packed into an HDF5 chunk as byte planes under Zstandard:

    float32   a0 a1 a2 a3 | b0 b1 b2 b3 | ...  -->  a0 b0 .. | a1 b1 .. | a2 b2 .. | a3 b3 ..  -->  one zstd frame
                                                   low mantissa bytes          sign and exponent

Trained weights differ in their mantissas, little in their exponents: planes bring like bytes together. This is HDF5's
shuffle filter followed by filter 32015 (zstd), so any HDF5 with the plugin of that number, as the package hdf5plugin
brings it, reads a chunk without us, and we need no plugin. The last chunk of a dataset is as large as the others, its
end zeros. A chunk that does not get smaller is kept unpacked; its length says so, and to HDF5 a filter mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard

from hpcllm.checkpoint.slabs import Slab, place_of
from hpcllm.errors import CheckpointError
from hpcllm.mpi.partition import share

Attribute = str | int | float | bool
Block = tuple[str, int]  # dataset, number of the block in it
Bytes = bytes | bytearray | memoryview

# a run's tensors, by kind: <kind>/<parameter>; and its tokenizer
MODEL, MASTER = "model", "optimizer/master"  # master: fp32, where it is not the model itself
EXP_AVG, EXP_AVG_SQ = "optimizer/exp_avg", "optimizer/exp_avg_sq"
TOKENIZER = "tokenizer"
TEMPLATE, TEMPLATE_VARIABLES = "data/template", "data/template_variables"  # attributes of a run on chats
END_OF_TEXT = "<|end_of_text|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|endoftext|>", "</s>")  # of tokenizers: ours and Llama 3, GPT-2, RoBERTa
CHECKSUMS, PACKED = "checksums", "packed"
COMPLETE = "complete"
DTYPE_ATTRIBUTE = "dtype"  # on a dataset whose element type HDF5 does not have
ZSTD_FILTER = 32015  # registered with The HDF Group

BLOCK_BYTES = 1 << 22  # keeps a file system busy, and costs a reader of a few rows little
_PAGE_BYTES = 4096
_LONGEST_NAME = 1000

# name -> stored type; HDF5 before 2.0 has no bfloat16, so its bits are stored as uint16
STORED_AS = {
    **{f"float{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"int{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    "bfloat16": np.dtype("<u2"),
}


@dataclass(frozen=True)
class DatasetSpec:
    """Global shape and element type (a key of STORED_AS) of a dataset, and the blocks that follow from them."""

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
        """(1, .., 1, n, full ..): the shape of every block but the last ones along the dim that is cut.

        As many bytes as fit into BLOCK_BYTES, and whole pages of the file where whole rows can make them.
        """
        shape, item_bytes = self.shape, self.item_bytes
        if not shape:
            return ()
        dim = next(dim for dim in range(len(shape)) if item_bytes * math.prod(shape[dim + 1 :]) <= BLOCK_BYTES)
        row_bytes = item_bytes * math.prod(shape[dim + 1 :])
        rows = BLOCK_BYTES // row_bytes
        if rows < shape[dim]:
            page_rows = _PAGE_BYTES // math.gcd(_PAGE_BYTES, row_bytes)
            rows -= rows % page_rows if rows >= page_rows else 0
        return (*(1 for _ in shape[:dim]), min(rows, shape[dim]), *shape[dim + 1 :])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full block, and of every unpacked chunk of an archive."""
        return math.prod(self.block_shape) * self.item_bytes

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.prod(_grid(self.shape, self.block_shape))

    def block(self, dataset: str, index: int) -> Slab:
        """Block `index`, 0 <= index < blocks, of the dataset that has this spec; numbered in the order of bytes."""
        size = self.block_shape
        cells = []
        for count in reversed(_grid(self.shape, size)):
            index, at = divmod(index, count)
            cells.append(at)
        start = tuple(at * n for at, n in zip(reversed(cells), size, strict=True))
        return Slab(dataset, start, tuple(min(n, g - s) for n, g, s in zip(size, self.shape, start, strict=True)))

    def block_offset(self, block: Slab) -> int:
        """Byte of the dataset at which a block begins."""
        return place_of(block.start, self.shape) * self.item_bytes

    def touching(self, slab: Slab) -> Iterator[int]:
        """Blocks that share an element with a slab of the dataset, ascending."""
        if not slab.elements:
            return
        size = self.block_shape
        cells = [range(s // n, (s + m - 1) // n + 1) for s, m, n in zip(slab.start, slab.shape, size, strict=True)]
        grid = _grid(self.shape, size)
        yield from (place_of(cell, grid) for cell in itertools.product(*cells))


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
    with np.errstate(invalid="ignore"):  # a caller may be looking for NaN of any kind
        return values.astype(np.float64)


def checksum(data: Bytes) -> int:
    """XXH3 (64 bits): 31 GB/s on a core, three times a copy in memory; zlib's crc32 makes 4. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_ranges(specs: Mapping[str, DatasetSpec]) -> dict[str, range]:
    """Dataset -> where the checksums of its blocks lie in /checksums."""
    ranges, first = {}, 0
    for name in sorted(specs):
        ranges[name] = range(first, first + specs[name].blocks)
        first += specs[name].blocks
    return ranges


def blocks_of(specs: Mapping[str, DatasetSpec]) -> list[Block]:
    """All blocks of all datasets, in the order of the file."""
    return [(name, index) for name in sorted(specs) for index in range(specs[name].blocks)]


def block_bytes(specs: Mapping[str, DatasetSpec], block: Block) -> int:
    """Bytes of a block's values, packed or not in the file."""
    spec = specs[block[0]]
    return spec.block(*block).elements * spec.item_bytes


def my_blocks(specs: Mapping[str, DatasetSpec], rank: int, ranks: int) -> list[Block]:
    """A rank's share of all blocks, where any rank could do any of them: a contiguous stretch of the file.

    rank 0   a[0] a[1] a[2] b[0]
    rank 1                       b[1] c[0] c[1] c[2]      no rank gets more than the mean and one block
    """
    blocks = blocks_of(specs)
    mine = share([block_bytes(specs, block) for block in blocks], rank, ranks)
    return blocks[mine.start : mine.stop]


def pack(block: Bytes, item_bytes: int, chunk_bytes: int, level: int) -> bytes:
    """The chunk that begins with `block`, as it is stored. Releases the GIL.

    item_bytes: of an element. level: of Zstandard.
    """
    plain = np.zeros(chunk_bytes, dtype=np.uint8)
    plain[: len(block)] = np.frombuffer(block, dtype=np.uint8)
    planes = np.empty((item_bytes, chunk_bytes // item_bytes), dtype=np.uint8)
    for number, plane in enumerate(planes):
        plane[:] = plain[number::item_bytes]
    packed: bytes = zstandard.ZstdCompressor(level=level).compress(planes.data)
    return packed if len(packed) < chunk_bytes else plain.tobytes()


def filter_mask(stored_bytes: int, chunk_bytes: int) -> int:
    """HDF5's mask of the filters that were skipped for a chunk: both or none."""
    return 0b11 if stored_bytes == chunk_bytes else 0


def unpack(stored: Bytes, out: memoryview, item_bytes: int, chunk_bytes: int) -> None:
    """Fill `out` with the block that a chunk begins with. Releases the GIL.

    At most chunk_bytes are allocated, whatever the chunk says. Raises CheckpointError if it is not one that we write.
    """
    if len(stored) == chunk_bytes:
        out[:] = memoryview(stored)[: len(out)]
        return
    planes = np.frombuffer(_inflate(stored, chunk_bytes), dtype=np.uint8).reshape(item_bytes, -1)
    elements = np.frombuffer(out, dtype=np.uint8).reshape(-1, item_bytes)
    for number, plane in enumerate(planes):
        elements[:, number] = plane[: len(elements)]


def _inflate(stored: Bytes, chunk_bytes: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != chunk_bytes:  # before anything is allocated for it
            raise CheckpointError(f"unpacks to {claimed} bytes, not {chunk_bytes}")
        inflated: bytes = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"does not unpack: {error}") from error
    if len(inflated) != chunk_bytes:
        raise CheckpointError(f"unpacks to {len(inflated)} bytes, not {chunk_bytes}")
    return inflated


def _grid(shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """Number of blocks along each dim."""
    return tuple(-(-g // n) for g, n in zip(shape, size, strict=True))
