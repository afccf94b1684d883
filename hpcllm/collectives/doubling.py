"""`recursive_doubling` and `rabenseifner`: allreduces with partners at distances 1, 2, 4 ...: log2(ranks) levels.

recursive_doubling: everybody's whole sum so far, with a partner twice as far away at each level; for small x.

    rank       0     1     2     3
    level 0    0+1   0+1   2+3   2+3
    level 1    0..3  0..3  0..3  0..3

Same bits everywhere: partners encode, and both add the two decoded values, the lower place's first; so the ranks
that have met hold equal bits at every level. The sum is rounded at each level, and encoded again at the next.

rabenseifner: halve the array and the distance log2(ranks) times, then double both again.

    4 ranks, pieces a b c d       a+ is a sum over the ranks met so far
    rank        0       1       2       3
    distance 2  ab+     ab+     cd+     cd+      send the other half, add what comes to one's own
             1  a+      b+      c+      d+       complete: encoded once here, by the owner
             1  ab      ab      cd      cd       the bytes so far, as they came
             2  abcd    abcd    abcd    abcd

Bytes sent by a rank: 2 (n - 1) / n of x, as in a ring, with 2 log2(n) messages and log2(n) roundings.

Both need 2^k ranks; the others are folded into their neighbours: they hand in their addend first, get the result last.

    7 ranks, 4 places, 3 extra ranks     0->1   2->3   4->5   6      an addend goes in, the result's bytes come out
    places                                 0      1      2    3

Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.5;
Rabenseifner 2004, "Optimization of Collective Reduction Operations" (vector halving, distance doubling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Packed
from hpcllm.mpi.partition import piece_range

DOUBLING_VALUES = 1 << 20  # longer arrays go part by part, which bounds the scratch memory; multiples of every block
HALVING_VALUES = 1 << 22


def recursive_doubling_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    fold, n = Fold(group, f"a sum by recursive doubling over {group.size} ranks"), x.numel()
    for start in range(0, n if group.size > 1 else 0, DOUBLING_VALUES):
        part = x[start : start + DOUBLING_VALUES]
        fold.hand_in(part, codec, (fold.levels * group.size + group.rank) * n + start)
        if fold.place is not None:
            for level in range(fold.levels):
                # ranks that hold the same bits must round them alike, and others apart
                index = (level * group.size + (fold.place >> level)) * n + start
                _meet(part, fold.place, fold.place ^ 1 << level, index, fold, codec)
        fold.hand_out(part)


def _meet(x: torch.Tensor, place: int, partner: int, index: int, fold: Fold, codec: Codec) -> None:
    memory, peer = fold.group.wire.memory, fold.rank_at(partner)
    mine = codec.encode(x, memory.scratch("mine", codec.encoded_bytes(x.numel())), index)
    theirs = memory.scratch("theirs", codec.encoded_bytes(x.numel()))
    fold.exchange("partial sum", mine, theirs, peer, x.nbytes)
    theirs = theirs[: codec.used_bytes(theirs, x.numel())]
    lower, upper = (mine, theirs) if place < partner else (theirs, mine)
    total = memory.workspace("total", x.numel(), torch.float32)
    codec.decode(lower, total)
    codec.decode_add(upper, total)
    x.copy_(total)


def rabenseifner_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    fold = Fold(group, f"a Rabenseifner sum over {group.size} ranks")
    for start in range(0, x.numel() if group.size > 1 else 0, HALVING_VALUES):
        index = x.numel() * group.rank + start
        part = x[start : start + HALVING_VALUES]
        fold.hand_in(part, codec, index)
        if fold.place is not None:
            pieces = [piece_range(part.numel(), fold.places, codec.block, place) for place in range(fold.places)]
            _halve(part, pieces, fold.place, index, fold, codec)
            _double(part, pieces, fold.place, index, fold, codec)
        fold.hand_out(part)


def _halve(x: torch.Tensor, pieces: list[tuple[int, int]], place: int, index: int, fold: Fold, codec: Codec) -> None:
    """Piece `place` of x becomes its sum over the places."""
    group, distance, low = fold.group, fold.places // 2, 0
    while distance:
        kept, given = (low + distance, low) if place & distance else (low, low + distance)
        peer = fold.rank_at(place ^ distance)
        mine, theirs = (slice(pieces[first][0], pieces[first + distance - 1][1]) for first in (given, kept))
        slot = group.wire.memory.scratch("mine", codec.encoded_bytes(x[mine].numel()))
        data = codec.encode(x[mine], slot, index + mine.start) if x[mine].numel() else slot[:0]
        room_bytes = codec.encoded_bytes(x[theirs].numel()) if x[theirs].numel() else 0
        landing = group.wire.memory.scratch("theirs", room_bytes)
        fold.exchange("half", data, landing, peer, x[mine].nbytes)
        if x[theirs].numel():
            _add_encoded(landing, x[theirs], group, codec)
        low, distance = kept, distance // 2


def _double(x: torch.Tensor, pieces: list[tuple[int, int]], place: int, index: int, fold: Fold, codec: Codec) -> None:
    """Piece p of x, complete at place p, becomes everybody's."""
    lengths = [end - start for start, end in pieces]
    packed = Packed(fold.group.wire, codec, lengths)
    packed.add(x[slice(*pieces[place])], index + pieces[place][0])
    distance = 1
    while distance < fold.places:
        # the i-th piece in memory is that of place ^ i, for the partner's part too: it just follows
        coming = [lengths[place ^ i] for i in range(distance, 2 * distance)]
        plain_bytes = sum(lengths[place ^ i] for i in range(distance)) * x.element_size()
        peer = fold.rank_at(place ^ distance)
        fold.exchange("half", packed.front(distance), packed.room(coming), peer, plain_bytes)
        packed.received(coming)
        distance *= 2
    for i in range(1 if codec.lossless else 0, fold.places):
        part = x[slice(*pieces[place ^ i])]
        if part.numel():
            codec.decode(packed.piece(i), part)


@dataclass(frozen=True)
class Fold:
    """Places of the ranks among a power of two of them."""

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

    def exchange(self, name: str, data: torch.Tensor, landing: torch.Tensor, peer: int, plain_bytes: int) -> None:
        """Send `data` to a rank while `landing` fills from it, and wait for both. Raises StallError."""
        group = self.group
        group.wire.exchange(
            group.comm, data, peer, landing, peer, plain_bytes, lambda: f"{name} of {self.what}, {group.name(peer)}"
        )

    def hand_in(self, x: torch.Tensor, codec: Codec, index: int) -> None:
        """Add extra ranks' x to their neighbours' x."""
        group = self.group
        if self._pairs and self.place is None:
            slot = group.wire.memory.scratch("fold", codec.encoded_bytes(x.numel()))
            data = codec.encode(x, slot, index)
            requests = group.wire.send(group.comm, data, group.rank + 1, 0, x.nbytes)
            group.wire.waits.all(requests, lambda: f"addend of {self.what} to {group.name(group.rank + 1)}")
        elif self._pairs:
            slot = group.wire.memory.scratch("fold", codec.encoded_bytes(x.numel()))
            requests = group.wire.receive(group.comm, slot, group.rank - 1, 0)
            group.wire.waits.all(requests, lambda: f"addend of {self.what} from {group.name(group.rank - 1)}")
            _add_encoded(slot, x, group, codec)

    def hand_out(self, x: torch.Tensor) -> None:
        """Send neighbours' x, the result, to the extra ranks: its own bytes, so that no bit differs."""
        group = self.group
        if not self._pairs or not x.numel():
            return
        raw = group.wire.memory.staged(Raw(x.dtype))
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
        """True if this rank is an extra one or has one."""
        return self.group.rank < 2 * (self.group.size - self.places)


def _add_encoded(landing: torch.Tensor, x: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) += the n values encoded at the front of `landing`, in fp32, rounded to x's dtype."""
    data = landing[: codec.used_bytes(landing, x.numel())]
    if x.dtype == torch.float32:
        codec.decode_add(data, x)
        return
    total = group.wire.memory.workspace("total", x.numel(), torch.float32)
    codec.decode_add(data, total.copy_(x))
    x.copy_(total)
