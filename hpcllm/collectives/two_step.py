"""`two_step`: everybody sends each owner its part, the owner adds up in rank order, and sends the sum to everybody.

    3 ranks, part r of a strip belongs to rank r; + is a sum over ranks
             addends (all-to-all)            sums (all-gather)
    rank 0   sends p1 to 1, p2 to 2          sends p0+ to 1 and 2
    rank 1   sends p0 to 0, p2 to 2          sends p1+ to 0 and 2
    rank 2   sends p0 to 0, p1 to 1          sends p2+ to 0 and 1

Two encodings for any number of ranks, of each addend and of the sum; a ring encodes partial sums again at every hop.
Bytes sent by a rank: 2 (n - 1) / n of x through the codec; messages: 2 (n - 1) a strip, fewer where x is short.

x travels in strips (strips.py). In one turn of the loop a rank sends the addends of strip k, adds up strip k - LAG,
whose addends have had LAG turns to arrive, and decodes the sums of strip k - 2 LAG:

    turn       0   1   2   3   4   5   6   7        4 strips, drawn with LAG 2
    addends    s0  s1  s2  s3                       the wire always has the next strips queued; alone stand only
    sum, send          s0  s1  s2  s3               the first encoding, the last sum and the last decoding
    decode                     s0  s1  s2  s3

Arrays on a device: where the codec can, one kernel reads all addends of a part, adds them up and encodes the sum.

Same bits everywhere: the owner too uses the decoded sum. Its own addend it takes as it is.
Source: Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.3, for the all-to-all reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives import strips
from hpcllm.collectives.group import Group
from hpcllm.collectives.legs import LAG, Addends, Sums, Team, Work
from hpcllm.mpi.partition import chunk_range, segment_range, whole_blocks

DEPTH = 2 * LAG  # turns from the first addends of a strip to its last sum
UNDER_WAY_BYTES = 4 << 20  # of a reduce-scatter: a thread beside one that computes may not run for some milliseconds


def two_step_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    for _ in two_step_turns(x, group, codec):
        pass


def two_step_turns(x: torch.Tensor, group: Group, codec: Codec, length: int = 0) -> Iterator[None]:
    """Sum x (n,) over the group in place, turn by turn, until exhausted: turn t reads strip t and ends strip t - DEPTH.

    length: of strips; 0: strip_values. Collective over group. Raises StallError, CodecError.
    """
    n, size = x.numel(), group.size
    length = length or strips.strip_values(n, size, codec.block, x.is_cpu)
    split = strips.split_strips(n, length, size, codec.block)
    work = Work.on_split(x, codec, _everybody(group), split, -(-n // length), length)
    if size == 1 or not work.strips:
        return
    addends, sums = Addends(work), Sums(work)
    for turn in range(work.strips + DEPTH):
        addends.send(turn)
        if 0 <= turn - LAG < work.strips:
            sums.send(turn - LAG, addends)
        sums.decode(turn - DEPTH)
        yield
    addends.sent.wait_all()
    sums.slots.wait_all()


def two_step_reduce_scatter(
    x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec, chunks: Sequence[tuple[int, int]] = ()
) -> None:
    """x (n,) -> out: this rank's chunk of the sum, in fp32 and rounded once. Collective over group.

    chunks: first value and end of each rank's; of the same length if not given.
    """
    n, size = x.numel(), group.size
    longest = max(end - start for start, end in chunks) if chunks else -(-n // size)
    most, turn = strips.most_values(x.is_cpu)
    length = whole_blocks(min(most, turn // size, longest), codec.block)
    work = Work(x, codec, _everybody(group), _Chunks(n, size, length, chunks), -(-longest // length), length, size)
    if not work.strips:
        return
    lag = max(LAG, UNDER_WAY_BYTES // (size * work.slot_bytes))
    addends = Addends(work, lag)
    for turn in range(work.strips + lag):
        addends.send(turn)
        done = turn - lag
        if 0 <= done < work.strips:
            first, end = segment_range(0, out.numel(), length, done)
            total = addends.add_up(done, out[first:end])
            if total.data_ptr() != out[first:end].data_ptr():
                out[first:end].copy_(total)
    addends.sent.wait_all()


@dataclass(frozen=True)
class _Chunks:
    """Parts of a reduce-scatter: each rank owns a chunk of x, and strip k has the k-th segment of each."""

    n: int
    ranks: int
    length: int
    given: Sequence[tuple[int, int]]

    def part(self, strip: int, place: int) -> tuple[int, int]:
        chunk = self.given[place] if self.given else chunk_range(self.n, self.ranks, place)
        return segment_range(*chunk, self.length, strip)

    def number(self, strip: int, place: int) -> int:  # noqa: ARG002 -- the same in every strip
        return place

    def places(self, strip: int, after: int) -> Iterator[int]:  # noqa: ARG002 -- the same in every strip
        return ((after + 1 + offset) % self.ranks for offset in range(self.ranks))


def _everybody(group: Group) -> Team:
    return Team("row", group, group.size, group.rank, lambda place: place, f"a two-step sum over {group.size} ranks")
