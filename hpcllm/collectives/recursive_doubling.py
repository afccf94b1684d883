"""`recursive_doubling`: everybody's whole sum so far, with a partner twice as far away at each level.

    rank       0     1     2     3          log2(ranks) messages: for small x
    level 0    0+1   0+1   2+3   2+3
    level 1    0..3  0..3  0..3  0..3

Same bits everywhere: partners encode, and both add the two decoded values, the lower place's first; so the ranks
that have met hold equal bits at every level. What is stored is rounded at each level, and encoded again at the next.
Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.5.
"""

from __future__ import annotations

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.folding import Fold
from hpcllm.collectives.group import Group

PIECE_VALUES = 1 << 20  # longer arrays go piece by piece, which bounds the scratch memory; a multiple of every block


def recursive_doubling_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    fold = Fold(group, f"a sum by recursive doubling over {group.size} ranks")
    for start in range(0, x.numel() if group.size > 1 else 0, PIECE_VALUES):
        _sum(x[start : start + PIECE_VALUES], start, x.numel(), fold, codec)


def _sum(x: torch.Tensor, start: int, n: int, fold: Fold, codec: Codec) -> None:
    """x: values from `start` on of an array of n."""
    fold.hand_in(x, codec, (fold.levels * fold.group.size + fold.group.rank) * n + start)
    place = fold.place
    if place is not None:
        _climb(x, place, start, n, fold, codec)
    fold.hand_out(x)


def _climb(x: torch.Tensor, place: int, start: int, n: int, fold: Fold, codec: Codec) -> None:
    for level in range(fold.levels):
        # ranks that hold the same bits must round them alike, and others apart
        index = (level * fold.group.size + (place >> level)) * n + start
        _meet(x, place, place ^ 1 << level, index, fold, codec)


def _meet(x: torch.Tensor, place: int, partner: int, index: int, fold: Fold, codec: Codec) -> None:
    wire, peer = fold.group.wire, fold.rank_at(partner)
    mine = codec.encode(x, wire.scratch("mine", codec.encoded_bytes(x.numel())), index)
    theirs = wire.scratch("theirs", codec.encoded_bytes(x.numel()))
    wire.exchange(
        fold.group.comm,
        mine,
        peer,
        theirs,
        peer,
        x.nbytes,
        lambda: f"partial sum of {fold.what}, {fold.group.name(peer)}",
    )
    theirs = theirs[: codec.used_bytes(theirs, x.numel())]
    lower, upper = (mine, theirs) if place < partner else (theirs, mine)
    total = wire.workspace("total", x.numel(), torch.float32)
    codec.decode(lower, total)
    codec.decode_add(upper, total)
    x.copy_(total)
