"""Host memory beside a device: pinned, so that copies run while the device computes, and with little of it unused.

sizes       [ 70 MiB ][ 40 MiB ][ 9 ][ 3 ]
pieces      [ 128 MiB: 70, 40, 9, 3      ]       pinned memory comes in powers of two, whatever is asked for
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch

ALIGN_BYTES = 64
PIECE_BYTES = 64 << 20
K = TypeVar("K", bound=Hashable)


def host_memory(sizes: Mapping[K, int], pinned: bool) -> dict[K, torch.Tensor]:
    """Return (size,) uint8 in host memory for each of these sizes in bytes, not set to anything.

    All pieces of memory that they lie in are powers of two: each of the size that has the least room left once it is
    filled, the largest tensor first.
    """
    left = sorted(sizes, key=lambda name: -sizes[name])
    found: dict[K, torch.Tensor] = {}
    while left:
        piece_bytes, inside = _fullest(left, [_room(sizes[name]) for name in left])
        piece, place = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pinned), 0
        for name in inside:
            found[name] = piece[place : place + sizes[name]]
            place += _room(sizes[name])
        left = [name for name in left if name not in found]
    return found


def _fullest(names: Sequence[K], rooms: Sequence[int]) -> tuple[int, list[K]]:
    """Return the bytes of a piece of memory for some of these, and those that lie in it. rooms: of each, falling."""
    most = _power_above(sum(rooms))
    size, least = most, min(most, max(PIECE_BYTES, _power_above(rooms[0])))
    best: tuple[float, int, list[K]] = (0.0, 0, [])
    while size >= least:
        inside, taken = [], 0
        for name, room in zip(names, rooms, strict=True):
            if taken + room <= size:
                inside.append(name)
                taken += room
        best = max(best, (taken / size, size, inside), key=lambda one: one[:2])
        size //= 2
    return best[1], best[2]


def _power_above(size_bytes: int) -> int:
    """Return the least power of two that is at least this, 1 at least."""
    return 1 << max(size_bytes - 1, 0).bit_length()


def _room(size_bytes: int) -> int:
    return math.ceil(size_bytes / ALIGN_BYTES) * ALIGN_BYTES
