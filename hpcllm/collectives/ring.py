"""`ring`: reduce-scatter, then all-gather, each rank talking to its two neighbours only.

    x is cut into one chunk a rank. At each hop every rank sends a chunk to the right and receives one from the left:

    hop          0      1     |  2      3          3 ranks; rank r sends chunk r - hop
    rank 0 sends c0     c2+   |  c1     c0         + a partial sum; after the bar chunks are complete
    rank 1 sends c1     c0+   |  c2     c1
    rank 2 sends c2     c1+   |  c0     c2
                 reduce-scatter  all-gather

Bytes sent by a rank: 2 (n - 1) / n of x, the least any allreduce can send; messages: 2 (n - 1) a lane. A chunk travels
in lanes of about a megabyte that take turns, so that the sum of one lane runs while the others are on the wire.

Same bits everywhere: a chunk's sum runs in ring order starting at its own rank and ends at one owner, who encodes it
once and uses the decoded value itself; the others forward those bytes as they came.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3.
"""

from __future__ import annotations

import math

import torch
from mpi4py import MPI

from hpcllm import buffers
from hpcllm.codecs import RAW, Codec
from hpcllm.waiting import Waits

LANE_BYTES = 1 << 20


def ring_allreduce(
    x: torch.Tensor, comm: MPI.Intracomm, codec: Codec, waits: Waits, scratch: torch.Tensor | None = None
) -> int:
    """Sum x (n,) float32 over comm in place, any n. Returns the bytes that this rank sent. Collective over comm.

    With a lossy codec each hop of the reduce-scatter rounds a partial sum, so the error grows with the ranks.
    """
    if comm.size == 1 or x.numel() == 0:
        return 0
    if scratch is None:
        scratch = torch.empty(ring_scratch_bytes(x.numel(), comm.size, codec), dtype=torch.uint8)
    lanes = [_Lane(lane, x, comm, codec, waits, scratch) for lane in range(_lane_count(x.numel(), comm.size))]
    for lane in lanes:
        lane.start()
    for hop in range(2 * (comm.size - 1)):
        for lane in lanes:
            lane.advance(hop)
    for lane in lanes:
        lane.finish()
    return sum(lane.sent_bytes for lane in lanes)


def ring_scratch_bytes(n: int, ranks: int, codec: Codec) -> int:
    """Bytes of scratch that ring_allreduce of n values needs: two slots a lane."""
    return 2 * _lane_count(n, ranks) * codec.encoded_bytes(_longest_part(n, ranks))


def _lane_count(n: int, ranks: int) -> int:
    return max(1, round(4 * n / ranks / LANE_BYTES))


def _longest_part(n: int, ranks: int) -> int:
    longest_chunk = math.ceil(n / ranks)
    return math.ceil(longest_chunk / _lane_count(n, ranks))


class _Lane:
    """One part of every chunk on its way around the ring."""

    def __init__(
        self, lane: int, x: torch.Tensor, comm: MPI.Intracomm, codec: Codec, waits: Waits, scratch: torch.Tensor
    ) -> None:
        self.lane, self.x, self.comm, self.codec, self.waits = lane, x, comm, codec, waits
        self.lanes = _lane_count(x.numel(), comm.size)
        self.left, self.right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        slot_bytes = codec.encoded_bytes(_longest_part(x.numel(), comm.size))
        self.slot, self.spare = scratch[2 * lane * slot_bytes :][: 2 * slot_bytes].view(2, slot_bytes)
        self.sending: list[MPI.Request] = []
        self.receiving: list[MPI.Request] = []
        self.sent_bytes = 0

    def start(self) -> None:
        self._receive(0)
        self._send(self.codec.encode(self._part(self.comm.rank), self.spare))

    def advance(self, hop: int) -> None:
        """Take in what hop brought, pass it on as the next hop's message."""
        self.waits.all(self.receiving, lambda: self._name(hop, "from", self.left))
        self.waits.all(self.sending, lambda: self._name(hop, "to", self.right))  # its memory is reused below
        part, data = self._part(self._received_chunk(hop)), self.landing
        last_sum = self.comm.size - 2
        if hop <= last_sum:
            self.codec.decode_add(data, part)
            data = self.codec.encode(part, self.spare)
        if hop >= last_sum:
            self.codec.decode(data, part)
        if hop > last_sum:
            self.slot, self.spare = self.spare, self.slot  # these bytes travel on while the next land beside them
        if hop < 2 * self.comm.size - 3:
            self._receive(hop + 1)
            self._send(data)

    def finish(self) -> None:
        self.waits.all(self.sending, lambda: self._name(2 * self.comm.size - 3, "to", self.right))

    def _receive(self, hop: int) -> None:
        part = self._part(self._received_chunk(hop))
        if hop >= self.comm.size - 1 and self.codec is RAW:
            self.landing = buffers.as_bytes(part)  # complete and uncoded: straight to its place
        else:
            self.landing = self.slot[: self.codec.encoded_bytes(part.numel())]
        self.receiving = buffers.irecv(self.comm, self.landing, self.left, self.lane)

    def _send(self, data: torch.Tensor) -> None:
        self.sending = buffers.isend(self.comm, data, self.right, self.lane)
        self.sent_bytes += data.numel()

    def _received_chunk(self, hop: int) -> int:
        return (self.comm.rank - hop - 1) % self.comm.size

    def _part(self, chunk: int) -> torch.Tensor:
        """This lane's share of a chunk of x."""
        n, ranks = self.x.numel(), self.comm.size
        start, end = n * chunk // ranks, n * (chunk + 1) // ranks
        first, last = ((end - start) * lane // self.lanes for lane in (self.lane, self.lane + 1))
        return self.x[start + first : start + last]

    def _name(self, hop: int, way: str, peer: int) -> str:
        world_rank = self.comm.group.Translate_ranks([peer], MPI.COMM_WORLD.group)[0]
        return f"hop {hop} of a ring sum over {self.comm.size} ranks, {way} rank {world_rank}, lane {self.lane}"
