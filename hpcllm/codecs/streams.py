"""What the variable-rate codecs have in common: streams of tiles that say how long they are.

    used bytes (8) | values (8) | table: a record a tile | bodies of the tiles, one behind the other

A record tells how long its tile's body is, so that whoever has the table can decode any tile. Numbers are little-endian.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.errors import CodecError

HEADER_BYTES = 16


def write_header(data: NDArray[np.uint8], used_bytes: int, n: int) -> None:
    data[:HEADER_BYTES].view("<u8")[:] = used_bytes, n


def read_used_bytes(name: str, data: torch.Tensor, n: int, least_bytes: int, most_bytes: int) -> int:
    """Bytes of the stream of n values at the start of `data` (any length); raises CodecError if that cannot be."""
    if data.numel() < HEADER_BYTES:
        raise CodecError(f"{name}: {data.numel()} bytes, fewer than the {HEADER_BYTES} of a header")
    used_bytes, values = map(int, data[:HEADER_BYTES].numpy().view("<u8"))
    if values != n:
        raise CodecError(f"{name}: the stream says it has {values} values, {n} were expected")
    if not least_bytes <= used_bytes <= most_bytes:
        raise CodecError(f"{name}: {used_bytes} bytes for {n} values; {least_bytes} to {most_bytes} are possible")
    return used_bytes


def check_whole(name: str, data: torch.Tensor, used_bytes: int) -> None:
    if data.numel() != used_bytes:
        raise CodecError(f"{name}: {data.numel()} bytes of a stream of {used_bytes}")
