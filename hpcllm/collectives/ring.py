"""`ring`: each rank sends to its right neighbour only and receives from its left one.

    x is cut into one chunk a rank. At each hop every rank sends a chunk to the right and receives one from the left:

    hop          0      1     |  2      3          3 ranks; rank r ends the first half with the sum of chunk r
    rank 0 sends c2     c1+   |  c0     c2         + a partial sum; after the bar chunks are complete
    rank 1 sends c0     c2+   |  c1     c0
    rank 2 sends c1     c0+   |  c2     c1
                 reduce-scatter  all-gather        allreduce is both, and either half stands alone

Bytes sent by a rank: (n - 1) / n of x in each half, the least that can be; messages: n - 1 a lane in each half. A chunk
travels in lanes that take turns, so that the sum of one lane runs while the others are on the wire: of about one MiB,
and of 8 to 16 on a device, whose sums take no time beside Python's 20 us for a message.

Same bits everywhere: a chunk's sum runs in ring order and ends at one owner, who encodes it once and uses the decoded
value itself; the others forward those bytes as they came. With a lossy codec, or values of 16 bits, each hop of the
reduce-scatter rounds a partial sum, so the error grows with the ranks.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import padded
from hpcllm.mpi.partition import chunk_range, piece_range

LANE_BYTES, DEVICE_LANE_BYTES = 1 << 20, 8 << 20


def ring_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) over the group in place, any n. Collective over group. Raises StallError, CodecError."""
    if group.size == 1 or x.numel() == 0:
        return
    start, end = chunk_range(x.numel(), group.size, group.rank)
    ring = _Ring(x, x[start:end], x, group, codec)
    ring.reduce_scatter()
    ring.allgather()


def ring_reduce_scatter(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) -> out: this rank's chunk of the sum. Collective over group. Raises StallError, CodecError."""
    if group.size == 1 or x.numel() == 0:
        out.copy_(x)
        return
    ring = _Ring(x, out, x, group, codec)
    ring.reduce_scatter()


def ring_allgather(
    part: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec, chunks: Sequence[tuple[int, int]] = ()
) -> None:
    """part (own chunk,), which may be out's own chunk -> out (n,), any n. Collective over group.

    Everyone, the owner included, gets the decoded values. chunks: first value and end of each rank's; of the same
    length if not given. Raises StallError, CodecError.
    """
    start, end = chunks[group.rank] if chunks else chunk_range(out.numel(), group.size, group.rank)
    if part.data_ptr() != out[start:].data_ptr():
        out[start:end].copy_(part)
    if group.size == 1 or out.numel() == 0:
        return
    ring = _Ring(out, out[start:end], out, group, codec, chunks)
    ring.allgather()


def lane_count(chunk_bytes: int, on_cpu: bool) -> int:
    """Return the number of lanes for chunks of so many bytes, of fp32."""
    return max(1, round(chunk_bytes / LANE_BYTES) if on_cpu else chunk_bytes // DEVICE_LANE_BYTES)


class _Ring:
    """One call's lanes. addends (n,): this rank's; total: where the sum of its chunk goes; out (n,): the result."""

    def __init__(
        self,
        addends: torch.Tensor,
        total: torch.Tensor,
        out: torch.Tensor,
        group: Group,
        codec: Codec,
        chunks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.addends, self.total, self.out, self.group, self.codec = addends, total, out, group, codec
        n = addends.numel()
        self.chunks = chunks or [chunk_range(n, group.size, rank) for rank in range(group.size)]
        longest = max(end - start for start, end in self.chunks)
        self.lane_count = lane_count(4 * longest, addends.is_cpu)
        longest_part = -(-longest // self.lane_count) + codec.block
        self.slot_bytes = padded(codec.encoded_bytes(min(longest_part, longest)))
        self.slots = group.wire.memory.scratch("ring", 2 * self.lane_count * self.slot_bytes)
        self.raw = isinstance(codec, Raw)
        self.lanes = [_Lane(lane, self) for lane in range(self.lane_count)]
        self.note(addends)
        group.wire.memory.unused(self.slots)

    def note(self, data: torch.Tensor) -> None:
        """Note that the stream is told all that it has to do with raw values, as codecs do with what they encode.

        A message of memory that nobody has noted would wait for all that the stream was told, by an event of its own.
        """
        if self.raw:
            self.group.wire.memory.record(data)

    def reduce_scatter(self) -> None:
        for lane in self.lanes:
            lane.start_sum()
        for hop in range(self.group.size - 1):
            for lane in self.lanes:
                lane.add(hop)

    def allgather(self) -> None:
        for lane in self.lanes:
            lane.start_gather()
        for hop in range(self.group.size - 1):
            for lane in self.lanes:
                lane.take(hop)


class _Lane:
    """One part of every chunk on its way around the ring. What a hop sends is gone when the next one has arrived."""

    def __init__(self, lane: int, ring: _Ring) -> None:
        self.lane, self.ring, self.group, self.codec = lane, ring, ring.group, ring.codec
        self.left, self.right = (self.group.rank - 1) % self.group.size, (self.group.rank + 1) % self.group.size
        start = 2 * lane * ring.slot_bytes
        self.slot, self.spare = ring.slots[start : start + 2 * ring.slot_bytes].view(2, ring.slot_bytes).unbind()
        self.raw = ring.raw
        self.sending: list[MPI.Request] = []

    def start_sum(self) -> None:
        self._receive(self.group.rank - 2, self.slot)
        first = self._part(self.group.rank - 1, self.ring.addends)
        self._send(self._encode(first, self.group.rank - 1), first)

    def add(self, hop: int) -> None:
        """Add this rank's addend to the partial sum that hop brought, and pass it on."""
        chunk = self.group.rank - hop - 2
        own = self._part(chunk, self.ring.addends)
        data = self._arrived(own, hop, "sum")
        if hop == self.group.size - 2:
            self._complete(data, own)
            return
        values = self._partial(data, own)
        data = self._encode(values, chunk)
        if self.raw:
            self.slot, self.spare = self.spare, self.slot  # the partial sum is where it landed
        self._receive(chunk - 1, self.slot)
        self._send(data, values)

    def start_gather(self) -> None:
        own = self._part(self.group.rank, self.ring.out)
        self._receive(self.group.rank - 1, self._place(self.group.rank - 1))
        data = self._encode(own, self.group.rank)
        self._send(data, own)
        if own.numel() and not self.codec.lossless:
            self.codec.decode(data, own)

    def take(self, hop: int) -> None:
        """Pass on the bytes that hop brought, then decode them."""
        chunk = self.group.rank - hop - 1
        part = self._part(chunk, self.ring.out)
        data = self._arrived(part, hop, "gather")
        if hop < self.group.size - 2:
            self.slot, self.spare = self.spare, self.slot
            self._receive(chunk - 1, self._place(chunk - 1))
            self._send(data, part)
        if part.numel():
            self.codec.decode(data, part)

    def _partial(self, data: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """data's values + own, rounded to dtype; raw ones where data is."""
        if self.raw:
            total = data.view(own.dtype).add_(own)  # of 16 bits: torch adds in fp32 and rounds once
            self.ring.note(data)
            return total
        total = self._sum(data, own, self._scratch("total", own, torch.float32))
        return total if own.dtype == torch.float32 else self._scratch("rounded", own, own.dtype).copy_(total)

    def _complete(self, data: torch.Tensor, own: torch.Tensor) -> None:
        first, last = self._piece(self.group.rank)
        result = self.ring.total[first:last]
        if self.raw:
            torch.add(data.view(own.dtype), own, out=result)
        elif own.dtype == torch.float32:
            self._sum(data, own, result)
        else:
            result.copy_(self._sum(data, own, self._scratch("total", own, torch.float32)))
        self.ring.note(result)

    def _sum(self, data: torch.Tensor, own: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        if total.data_ptr() != own.data_ptr():
            total.copy_(own)
        if own.numel():
            self.codec.decode_add(data, total)
        return total

    def _scratch(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.group.wire.memory.workspace(f"ring {name}", like.numel(), dtype)

    def _encode(self, values: torch.Tensor, chunk: int) -> torch.Tensor:
        if not values.numel():
            return self.spare[:0]
        ranks, n = self.group.size, self.ring.addends.numel()
        index = self.group.rank * n + self.ring.chunks[chunk % ranks][0] + self._piece(chunk)[0]
        return self.codec.encode(values, self.spare, index)

    def _piece(self, chunk: int) -> tuple[int, int]:
        """This lane's part of a chunk, counted from the chunk's start."""
        start, end = self.ring.chunks[chunk % self.group.size]
        return piece_range(end - start, self.ring.lane_count, self.codec.block, self.lane)

    def _part(self, chunk: int, x: torch.Tensor) -> torch.Tensor:
        start = self.ring.chunks[chunk % self.group.size][0]
        first, last = self._piece(chunk)
        return x[start + first : start + last]

    def _place(self, chunk: int) -> torch.Tensor:
        """Memory that a complete chunk is received in: its place in the result if it is uncoded."""
        return self._part(chunk, self.ring.out).view(torch.uint8) if self.raw else self.slot

    def _receive(self, chunk: int, memory: torch.Tensor) -> None:
        first, last = self._piece(chunk)
        self.landing = memory[: self.codec.encoded_bytes(last - first) if first < last else 0]
        self.receiving = self.group.wire.receive(self.group.comm, self.landing, self.left, self.lane)

    def _arrived(self, part: torch.Tensor, hop: int, half: str) -> torch.Tensor:
        """The encoding of `part` that hop brought, once what this lane has sent is gone."""
        group, what = self.group, f"hop {hop} of a ring {half} over {self.group.size} ranks"
        group.wire.waits.all(self.receiving, lambda: f"{what}, from {group.name(self.left)}, lane {self.lane}")
        group.wire.waits.all(self.sending, lambda: f"{what}, to {group.name(self.right)}, lane {self.lane}")
        if self.codec.fixed_rate or not part.numel():
            return self.landing
        return self.landing[: self.codec.used_bytes(self.landing, part.numel())]

    def _send(self, data: torch.Tensor, values: torch.Tensor) -> None:
        self.sending = self.group.wire.send(self.group.comm, data, self.right, self.lane, values.nbytes)
