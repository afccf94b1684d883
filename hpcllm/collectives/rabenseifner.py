"""`rabenseifner`: halve the array and the distance log2(ranks) times, then double both again.

    4 ranks, pieces a b c d       a+ is a sum over the ranks met so far
    rank        0       1       2       3
    distance 2  ab+     ab+     cd+     cd+      send the other half, add what comes to one's own
             1  a+      b+      c+      d+       complete: encoded once here, by the owner
             1  ab      ab      cd      cd       the bytes so far, as they came
             2  abcd    abcd    abcd    abcd

Bytes sent by a rank: 2 (n - 1) / n of x, as in a ring, with 2 log2(n) messages and log2(n) roundings.
Source: Rabenseifner 2004, "Optimization of Collective Reduction Operations" (vector halving, distance doubling).
"""

from __future__ import annotations

import torch

from hpcllm.chunks import piece_range
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.folding import Fold, add_encoded
from hpcllm.collectives.group import Group
from hpcllm.collectives.packed import Packed

ROUND_VALUES = 1 << 22  # longer arrays go part by part, which bounds the scratch memory; a multiple of every block


def rabenseifner_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    fold = Fold(group, f"a Rabenseifner sum over {group.size} ranks")
    for start in range(0, x.numel() if group.size > 1 else 0, ROUND_VALUES):
        index = x.numel() * group.rank + start
        part = x[start : start + ROUND_VALUES]
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
        slot = group.wire.scratch("mine", codec.encoded_bytes(x[mine].numel()))
        data = codec.encode(x[mine], slot, index + mine.start) if x[mine].numel() else slot[:0]
        landing = group.wire.scratch("theirs", codec.encoded_bytes(x[theirs].numel()) if x[theirs].numel() else 0)
        _exchange(fold, data, landing, peer, x[mine].nbytes)
        if x[theirs].numel():
            add_encoded(landing, x[theirs], group, codec)
        low, distance = kept, distance // 2


def _double(x: torch.Tensor, pieces: list[tuple[int, int]], place: int, index: int, fold: Fold, codec: Codec) -> None:
    """Piece p of x, complete at place p, becomes everybody's."""
    lengths = [end - start for start, end in pieces]
    packed = Packed(fold.group.wire, codec, lengths)
    packed.add(x[slice(*pieces[place])], index + pieces[place][0])
    distance = 1
    while distance < fold.places:
        # the i-th piece in memory is that of place ^ i, for the partner's part too: it is just put behind
        coming = [lengths[place ^ i] for i in range(distance, 2 * distance)]
        plain_bytes = sum(lengths[place ^ i] for i in range(distance)) * x.element_size()
        _exchange(fold, packed.front(distance), packed.room(coming), fold.rank_at(place ^ distance), plain_bytes)
        packed.received(coming)
        distance *= 2
    for i in range(1 if codec.lossless else 0, fold.places):
        part = x[slice(*pieces[place ^ i])]
        if part.numel():
            codec.decode(packed.piece(i), part)


def _exchange(fold: Fold, data: torch.Tensor, landing: torch.Tensor, peer: int, plain_bytes: int) -> None:
    group = fold.group
    group.wire.exchange(
        group.comm, data, peer, landing, peer, plain_bytes, lambda: f"half of {fold.what}, {group.name(peer)}"
    )
