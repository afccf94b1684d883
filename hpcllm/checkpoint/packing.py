"""One block of an archive <-> the bytes of its HDF5 chunk: byte planes, then Zstandard. Pure but for numpy.

    float32   a0 a1 a2 a3 | b0 b1 b2 b3 | ...  -->  a0 b0 .. | a1 b1 .. | a2 b2 .. | a3 b3 ..  -->  one zstd frame
                                                   low mantissa bytes          sign and exponent

Trained weights differ in their mantissas, little in their exponents: planes bring like bytes together. It is what HDF5
calls its shuffle filter, followed by filter 32015 (zstd), so any HDF5 with the plugin of that number, as the package
hdf5plugin brings it, reads a chunk without us, and we need no plugin. The last chunk of a dataset is as large as the
others, its end zeros. A chunk that does not get smaller is kept as it was; its length tells, and to HDF5 a mask of the
filters that were passed over.
"""

from __future__ import annotations

import numpy as np
import zstandard

from hpcllm.errors import CheckpointError

ZSTD_FILTER = 32015  # registered with The HDF Group

Bytes = bytes | bytearray | memoryview


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
    """What HDF5 is told of a chunk: which filters were passed over, both or none."""
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
