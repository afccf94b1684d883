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

from hpcllm.chunks import chunk_range, segment_range, whole_blocks
from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.raw import Raw
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Slots
from hpcllm.messages.memory import Carried

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
            if isinstance(codec, Carried) and codec.sums:
                sums.send_fused(done, addends.arrived(done, own.numel()), own, codec)
            else:
                total = addends.add_up(done, own)
                addends.sent.wait(done)  # long gone, but raw sums will arrive where these addends are
                sums.send(done, total, own)
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
    """How the chunks of one call are cut, and whom this rank talks to."""

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

    def send(self, data: torch.Tensor, peer: int, tag: int, values: int) -> list[MPI.Request]:
        return self.group.wire.send(self.group.comm, data, peer, tag, values * self.codec.dtype.itemsize)

    def slots(self, name: str, turns: int, count: int) -> Slots:
        what = f"{name} of a two-step sum over {self.group.size} ranks to go"
        return Slots(self.group.wire, f"two_step {name}", turns, count, self.slot_bytes, what)

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
        self.scratch = cut.group.wire.workspace("two_step total", cut.length, torch.float32)
        self._receive(0)

    def send(self, segment: int) -> None:
        if segment >= self.cut.segments:
            return
        self._receive(segment + 1)
        self.sent.wait(segment)
        encoded: list[tuple[torch.Tensor, int, int]] = []
        for place, peer in enumerate(self.cut.peers):
            first, end = self.cut.range(peer, segment)
            if first < end:
                slot = self.sent.take(segment, place, self.cut.slot_bytes)
                data = self.cut.codec.encode(self.x[first:end], slot, self.cut.index + first)
                encoded.append((data, peer, end - first))
            if self.x.is_cpu:
                self._start(segment, encoded)
        self._start(segment, encoded)  # a device is told of all encodings before the first is waited for

    def _start(self, segment: int, encoded: list[tuple[torch.Tensor, int, int]]) -> None:
        for data, peer, n in encoded:
            self.sent.hold(segment, self.cut.send(data, peer, ADDEND, n))
        encoded.clear()

    def arrived(self, segment: int, n: int) -> torch.Tensor:
        """(ranks, bytes): row r begins with rank r's encoding of n values of my chunk, all of which have come; mine is
        left out."""
        for rank in self.cut.peers if n else ():
            requests = self.arriving.pop((rank, segment))
            self.cut.group.wire.waits.all(requests, lambda rank=rank: self._name(rank, segment))  # type: ignore[misc]
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
        data = self._slot(rank, segment, own.numel())
        data = self.cut.arrived(
            self.arriving.pop((rank, segment)), data, own.numel(), lambda: self._name(rank, segment)
        )
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

    def _name(self, rank: int, segment: int) -> str:
        size, name = self.cut.group.size, self.cut.group.name(rank)
        return f"addend {segment} of a two-step sum over {size} ranks, from {name}"


class _Sums:
    """Second step: the sum of my chunk to everybody, and the other chunks' sums to me."""

    def __init__(self, x: torch.Tensor, cut: _Cut) -> None:
        self.x, self.cut = x, cut
        self.sent = cut.slots("sums", LAG + 1, 1)
        self.landing = cut.slots("arriving sums", LAG + 1, cut.group.size)
        self.arriving: dict[tuple[int, int], list[MPI.Request]] = {}

    def send(self, segment: int, total: torch.Tensor, own: torch.Tensor) -> None:
        """total: the sum, in scratch memory or in `own`, its place in x, which gets what the others get."""
        self._receive(segment)
        if not own.numel():
            return
        codec = self.cut.codec
        self.sent.wait(segment)
        if codec.lossless and total.data_ptr() != own.data_ptr():
            own.copy_(total)
            total = own
        data = codec.encode(total, self.sent.take(segment, 0, self.cut.slot_bytes), self._index(segment))
        self._to_all(segment, data, own.numel())
        if not codec.lossless:
            codec.decode(data, own)

    def send_fused(self, segment: int, addends: torch.Tensor, own: torch.Tensor, codec: Carried) -> None:
        """The same bytes and values, made of all addends by one kernel. own: my addend, and then its place in x."""
        self._receive(segment)
        if own.numel():
            self.sent.wait(segment)
            slot = self.sent.take(segment, 0, self.cut.slot_bytes)
            data = codec.sum_encode(addends, self.cut.group.rank, own, slot, self._index(segment))
            self._to_all(segment, data, own.numel())

    def _to_all(self, segment: int, data: torch.Tensor, n: int) -> None:
        for peer in self.cut.peers:
            self.sent.hold(segment, self.cut.send(data, peer, SUM, n))

    def _index(self, segment: int) -> int:
        return self.cut.index + self.cut.range(self.cut.group.rank, segment)[0]

    def decode(self, segment: int) -> None:
        for peer in self.cut.peers if segment >= 0 else ():
            part = self.cut.part(self.x, peer, segment)
            if part.numel():
                data = self._slot(peer, segment, part)
                requests = self.arriving.pop((peer, segment))
                data = self.cut.arrived(requests, data, part.numel(), partial(self._name, peer, segment))
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

    def _name(self, peer: int, segment: int) -> str:
        size, name = self.cut.group.size, self.cut.group.name(peer)
        return f"sum {segment} of a two-step sum over {size} ranks, from {name}"
