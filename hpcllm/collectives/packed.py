"""Encoded pieces one behind another, so that many travel as one message.

memory   [piece 0 .....][piece 1 ...][piece 2 ......][ room for what comes next
         ^0             ^ends[1]     ^ends[2]        ^ends[3]      each starts at a multiple of 64 bytes
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.wire import Wire, padded


class Packed:
    """Pieces in the order in which they were added or received."""

    def __init__(self, wire: Wire, codec: Codec, lengths: Iterable[int]) -> None:
        """lengths: values of all pieces that will ever be in it."""
        self.codec = codec
        self.memory = wire.scratch("packed", _room_bytes(codec, lengths))
        self.ends = [0]
        self.used: list[int] = []

    def add(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Encode one more piece; returns its bytes."""
        slot = self.memory[self.ends[-1] :]
        data = self.codec.encode(values, slot, index) if values.numel() else slot[:0]
        if data.data_ptr() != slot.data_ptr():
            slot[: data.numel()].copy_(data)
        self._append(data.numel())
        return self.piece(-1)

    def front(self, pieces: int) -> torch.Tensor:
        """The bytes of the first pieces, to be sent."""
        return self.memory[: self.ends[pieces]]

    def room(self, lengths: Iterable[int]) -> torch.Tensor:
        """Where pieces of these lengths can be received."""
        end = self.ends[-1]
        return self.memory[end : end + _room_bytes(self.codec, lengths)]

    def received(self, lengths: Iterable[int]) -> None:
        """Pieces of these lengths have come in the room. Raises CodecError."""
        for n in lengths:
            self._append(self.codec.used_bytes(self.memory[self.ends[-1] :], n) if n else 0)

    def piece(self, number: int) -> torch.Tensor:
        start = self.ends[:-1][number]
        return self.memory[start : start + self.used[number]]

    def _append(self, used_bytes: int) -> None:
        self.used.append(used_bytes)
        self.ends.append(self.ends[-1] + padded(used_bytes))


def _room_bytes(codec: Codec, lengths: Iterable[int]) -> int:
    """What pieces take at most; an empty one is no message, whatever its code's header would be."""
    return sum(padded(codec.encoded_bytes(n)) for n in lengths if n)
