"""Algorithms that halve or double need 2^k ranks; the others hand in their addend first and get the result last.

    7 ranks, 4 places, 3 extra ranks     0->1   2->3   4->5   6      an addend goes in, the result's bytes come out
    places                                 0      1      2    3

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.raw import Raw
from hpcllm.collectives.group import Group


@dataclass(frozen=True)
class Fold:
    group: Group
    what: str  # for error messages

    @property
    def levels(self) -> int:
        return self.group.size.bit_length() - 1

    @property
    def places(self) -> int:
        """The largest power of two that is not above the number of ranks."""
        return 1 << self.levels

    @property
    def place(self) -> int | None:
        """This rank's place; None if its addend was folded into the next rank's."""
        extra, rank = self.group.size - self.places, self.group.rank
        if rank >= 2 * extra:
            return rank - extra
        return rank // 2 if rank % 2 else None

    def rank_at(self, place: int) -> int:
        extra = self.group.size - self.places
        return 2 * place + 1 if place < extra else place + extra

    def hand_in(self, x: torch.Tensor, codec: Codec, index: int) -> None:
        """Extra ranks' x is added to their neighbours' x."""
        group = self.group
        if self._pairs and self.place is None:
            slot = group.wire.scratch("fold", codec.encoded_bytes(x.numel()))
            data = codec.encode(x, slot, index)
            requests = group.wire.send(group.comm, data, group.rank + 1, 0, x.nbytes)
            group.wire.waits.all(requests, lambda: f"addend of {self.what} to {group.name(group.rank + 1)}")
        elif self._pairs:
            slot = group.wire.scratch("fold", codec.encoded_bytes(x.numel()))
            requests = group.wire.receive(group.comm, slot, group.rank - 1, 0)
            group.wire.waits.all(requests, lambda: f"addend of {self.what} from {group.name(group.rank - 1)}")
            add_encoded(slot, x, group, codec)

    def hand_out(self, x: torch.Tensor) -> None:
        """Neighbours' x, the result, to the extra ranks: its own bytes, so that no bit differs."""
        group = self.group
        if not self._pairs or not x.numel():
            return
        raw = group.wire.memory.carry(Raw(x.dtype))
        slot = group.wire.landing("fold", x, raw)
        if self.place is None:
            requests = group.wire.receive(group.comm, slot, group.rank + 1, 0)
            group.wire.waits.all(requests, lambda: f"result of {self.what} from {group.name(group.rank + 1)}")
            raw.decode(slot, x)
        else:
            requests = group.wire.send(group.comm, raw.encode(x, slot), group.rank - 1, 0, x.nbytes)
            group.wire.waits.all(requests, lambda: f"result of {self.what} to {group.name(group.rank - 1)}")

    @property
    def _pairs(self) -> bool:
        """Whether this rank is an extra one or has one."""
        return self.group.rank < 2 * (self.group.size - self.places)


def add_encoded(landing: torch.Tensor, x: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) += the n values encoded at the front of `landing`, in fp32, rounded to x's dtype."""
    data = landing[: codec.used_bytes(landing, x.numel())]
    if x.dtype == torch.float32:
        codec.decode_add(data, x)
        return
    total = group.wire.workspace("total", x.numel(), torch.float32)
    codec.decode_add(data, total.copy_(x))
    x.copy_(total)
