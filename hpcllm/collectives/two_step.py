"""`two_step`: everybody sends each owner its chunk, the owner adds up in rank order, and sends the sum to everybody.

    3 ranks, chunk r belongs to rank r; + is a sum over ranks
             addends (all-to-all)            sums (all-gather)
    rank 0   sends c1 to 1, c2 to 2          sends c0+ to 1 and 2
    rank 1   sends c0 to 0, c2 to 2          sends c1+ to 0 and 2
    rank 2   sends c0 to 0, c1 to 1          sends c2+ to 0 and 1

Two encodings for any number of ranks, of each addend and of the sum; a ring encodes partial sums again at every hop.
Bytes sent by a rank: 2 (n - 1) / n of x through the codec; messages: 2 (n - 1) a segment.

A chunk travels in segments. In one turn of the loop a rank sends the addends of segment k, adds up segment k - LAG,
whose addends have had LAG turns to arrive, and decodes the sums of segment k - 2 LAG:

    turn       0   1   2   3   4   5   6   7        4 segments, drawn with LAG 2
    addends    s0  s1  s2  s3                       the wire always has the next segments queued; alone stand only
    sum, send          s0  s1  s2  s3               the first encoding, the last sum and the last decoding
    decode                     s0  s1  s2  s3

Arrays on a device: where the codec can, one kernel reads all addends of a segment, adds them up and encodes the sum.

Same bits everywhere: the owner too uses the decoded sum. Its own addend it takes as it is.
Source: Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.3, for the all-to-all reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Slots
from hpcllm.mpi.message_memory import StagedCodec
from hpcllm.mpi.partition import chunk_range, segment_range, whole_blocks

LAG = 3  # covers the moments in which a peer computes, or does not run at all
SEGMENT_VALUES = 1 << 17  # per peer: long enough for a wire, short enough for a cache and for the ends of the pipeline
DEVICE_SEGMENT_VALUES = 1 << 19  # to start a kernel takes a device as long as to encode a hundred thousand values
TURN_VALUES = 1 << 22  # of all peers: with many of them segments are shorter, which bounds the scratch memory
SHORTEST_SEGMENT = 1 << 15
ADDEND, SUM = 1, 2  # tags


def two_step_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    if group.size == 1:
        return
    cut = _Cut(x, group, codec)
    addends, sums = _Addends(x, cut), _Sums(x, cut)
    for turn in range(cut.segments + 2 * LAG):
        addends.send(turn)
        done = turn - LAG
        if 0 <= done < cut.segments:
            own = cut.part(x, group.rank, done)
            if isinstance(codec, StagedCodec) and codec.sums:
                sums.send(done, own, addends.arrived(done, own.numel()), codec)
            else:
                total = addends.add_up(done, own)
                addends.sent.wait(done)  # long gone, but raw sums will arrive where these addends are
                sums.send(done, own, total)
        sums.decode(turn - 2 * LAG)
    addends.sent.wait_all()
    sums.sent.wait_all()


def two_step_reduce_scatter(
    x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec, chunks: Sequence[tuple[int, int]] = ()
) -> None:
    """x (n,) -> out: this rank's chunk of the sum, in fp32 and rounded once. Collective over group.

    chunks: first value and end of each rank's; of the same length if not given.
    """
    cut = _Cut(x, group, codec, chunks)
    addends = _Addends(x, cut)
    for turn in range(cut.segments + LAG):
        addends.send(turn)
        done = turn - LAG
        if 0 <= done < cut.segments:
            first, end = segment_range(0, out.numel(), cut.length, done)
            addends.add_up(done, out[first:end])
    addends.sent.wait_all()


class _Cut:
    """Cuts of the chunks of one call, and the order in which this rank talks to its peers."""

    def __init__(self, x: torch.Tensor, group: Group, codec: Codec, chunks: Sequence[tuple[int, int]] = ()) -> None:
        self.group, self.codec, n = group, codec, x.numel()
        self.chunks = chunks or [chunk_range(n, group.size, rank) for rank in range(group.size)]
        longest = max(end - start for start, end in self.chunks)
        most = SEGMENT_VALUES if x.is_cpu else DEVICE_SEGMENT_VALUES
        per_peer = min(most, max(TURN_VALUES // max(1, group.size - 1), SHORTEST_SEGMENT))
        self.length = whole_blocks(min(per_peer, longest), codec.block)
        self.segments = math.ceil(longest / self.length)
        self.slot_bytes = codec.encoded_bytes(self.length)
        # each starts with another neighbour, so that no rank is everybody's first
        self.peers = [(group.rank + offset) % group.size for offset in range(1, group.size)]
        self.index = n * group.rank  # of this rank's values among those of all ranks

    def range(self, rank: int, segment: int) -> tuple[int, int]:
        return segment_range(*self.chunks[rank], self.length, segment)

    def part(self, x: torch.Tensor, rank: int, segment: int) -> torch.Tensor:
        first, end = self.range(rank, segment)
        return x[first:end]

    def slots(self, name: str, turns: int, count: int) -> Slots:
        what = f"{name} of a two-step sum over {self.group.size} ranks to go"
        return Slots(self.group.wire, f"two_step {name}", turns, count, self.slot_bytes, what)

    def name(self, what: str, segment: int, rank: int) -> str:
        return f"{what} {segment} of a two-step sum over {self.group.size} ranks, from {self.group.name(rank)}"

    def arrived(self, requests: list[MPI.Request], data: torch.Tensor, n: int, what: Callable[[], str]) -> torch.Tensor:
        """The encoding of n values that was received in front of `data`."""
        self.group.wire.waits.all(requests, what)
        return data if self.codec.fixed_rate else data[: self.codec.used_bytes(data, n)]


class _Addends:
    """First step: my addends to their owners, and everybody's addends of my chunk to me."""

    def __init__(self, x: torch.Tensor, cut: _Cut) -> None:
        self.x, self.cut = x, cut
        self.sent = cut.slots("addends", LAG + 1, len(cut.peers))
        self.landing = cut.slots("arriving addends", LAG + 2, cut.group.size)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}
        self.scratch = cut.group.wire.memory.workspace("two_step total", cut.length, torch.float32)
        self._receive(0)

    def send(self, segment: int) -> None:
        if segment >= self.cut.segments:
            return
        self._receive(segment + 1)
        self.sent.wait(segment)
        group, encoded = self.cut.group, []
        for place, peer in enumerate(self.cut.peers):
            first, end = self.cut.range(peer, segment)
            if first < end:
                slot = self.sent.take(segment, place, self.cut.slot_bytes)
                data = self.cut.codec.encode(self.x[first:end], slot, self.cut.index + first)
                encoded.append((data, peer, self.x[first:end].nbytes))
            if self.x.is_cpu or peer == self.cut.peers[-1]:  # a device is told of all encodings before a wait for one
                for data, to, plain_bytes in encoded:
                    self.sent.hold(segment, group.wire.send(group.comm, data, to, ADDEND, plain_bytes))
                encoded.clear()

    def arrived(self, segment: int, n: int) -> torch.Tensor:
        """(ranks, bytes): row r begins with rank r's encoding of n values of my chunk, all of which have come; mine is
        left out."""
        for rank in self.cut.peers if n else ():
            requests = self.arriving.pop((rank, segment))
            self.cut.group.wire.waits.all(requests, partial(self.cut.name, "addend", segment, rank))
        return self.landing.rows(segment)

    def add_up(self, segment: int, result: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of one segment of my chunk, in rank order and in fp32; result (length,) gets it, unless
        it is where my addend is and dtype is fp32: then the sum is in scratch memory. Returns the one that has it."""
        own = self.cut.part(self.x, self.cut.group.rank, segment)
        total = result
        if result.dtype != torch.float32 or (result.data_ptr() == own.data_ptr() and self.cut.group.rank):
            total = self.scratch[: own.numel()]
        for rank in range(self.cut.group.size if own.numel() else 0):
            self._add(rank, segment, own, total)
        if result.dtype == torch.float32:
            return total
        return result.copy_(total)

    def _add(self, rank: int, segment: int, own: torch.Tensor, total: torch.Tensor) -> None:
        if rank == self.cut.group.rank:
            if rank:
                total.add_(own)
            elif total.data_ptr() != own.data_ptr():
                total.copy_(own)
            return
        data, requests = self._slot(rank, segment, own.numel()), self.arriving.pop((rank, segment))
        data = self.cut.arrived(requests, data, own.numel(), lambda: self.cut.name("addend", segment, rank))
        if rank:
            self.cut.codec.decode_add(data, total)
        else:
            self.cut.codec.decode(data, total)

    def _receive(self, segment: int) -> None:
        first, end = self.cut.range(self.cut.group.rank, segment)
        for peer in self.cut.peers if first < end else ():
            slot = self._slot(peer, segment, end - first)
            requests = self.cut.group.wire.receive(self.cut.group.comm, slot, peer, ADDEND)
            self.arriving[peer, segment] = requests

    def _slot(self, rank: int, segment: int, n: int) -> torch.Tensor:
        return self.landing.take(segment, rank, self.cut.codec.encoded_bytes(n))


class _Sums:
    """Second step: the sum of my chunk to everybody, and the other chunks' sums to me."""

    def __init__(self, x: torch.Tensor, cut: _Cut) -> None:
        self.x, self.cut = x, cut
        self.sent = cut.slots("sums", LAG + 1, 1)
        self.landing = cut.slots("arriving sums", LAG + 1, cut.group.size)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}

    def send(self, segment: int, own: torch.Tensor, total: torch.Tensor, fused: StagedCodec | None = None) -> None:
        """Encode the sum of one segment of my chunk and send it to all; `own`, its place in x, gets what they get.

        total: the sum, in scratch memory or in `own`. With `fused` all addends instead, which one kernel of that codec
        adds up and encodes; own is my addend then.
        """
        self._receive(segment)
        if not own.numel():
            return
        group, codec = self.cut.group, self.cut.codec
        self.sent.wait(segment)
        slot = self.sent.take(segment, 0, self.cut.slot_bytes)
        index = self.cut.index + self.cut.range(group.rank, segment)[0]
        if fused:
            data = fused.sum_encode(total, group.rank, own, slot, index)
        else:
            if codec.lossless and total.data_ptr() != own.data_ptr():
                total = own.copy_(total)
            data = codec.encode(total, slot, index)
        for peer in self.cut.peers:
            self.sent.hold(segment, group.wire.send(group.comm, data, peer, SUM, own.nbytes))
        if not (fused or codec.lossless):
            codec.decode(data, own)

    def decode(self, segment: int) -> None:
        for peer in self.cut.peers if segment >= 0 else ():
            part = self.cut.part(self.x, peer, segment)
            if part.numel():
                data = self._slot(peer, segment, part)
                requests = self.arriving.pop((peer, segment))
                data = self.cut.arrived(requests, data, part.numel(), partial(self.cut.name, "sum", segment, peer))
                self.cut.codec.decode(data, part)

    def _receive(self, segment: int) -> None:
        for peer in self.cut.peers:
            part = self.cut.part(self.x, peer, segment)
            if part.numel():
                slot = self._slot(peer, segment, part)
                self.arriving[peer, segment] = self.cut.group.wire.receive(self.cut.group.comm, slot, peer, SUM)

    def _slot(self, peer: int, segment: int, part: torch.Tensor) -> torch.Tensor:
        if isinstance(self.cut.codec, Raw):
            return part.view(torch.uint8)  # straight to its place
        return self.landing.take(segment, peer, self.cut.codec.encoded_bytes(part.numel()))
