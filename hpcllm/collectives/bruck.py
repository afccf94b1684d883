"""`bruck`: log2(ranks) messages, each of up to half of all data: for small parts.

    all-gather, 5 ranks: what rank r has (relative: r, r + 1, ...)     all-to-all: block i, for rank r + i, goes on by
    start      r                                                       each power of two in i; after that it is there
    distance 1 r r+1                     from rank r + 1                distance 1   blocks 1 3
    distance 2 r r+1 r+2 r+3             from rank r + 2                distance 2   blocks 2 3
    distance 4 r r+1 r+2 r+3 r+4         from rank r + 4, one part      distance 4   block 4

Parts are encoded once, by their owner, and forwarded as bytes.
Source: Bruck et al. 1997, "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems",
sections 3 and 4.
"""

from __future__ import annotations

import torch

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group
from hpcllm.collectives.wire import Packed, padded
from hpcllm.mpi.partition import chunk_range, segment_range, whole_blocks

ROUND_VALUES = 1 << 22  # of all ranks; longer arrays go part by part, which bounds the scratch memory


def bruck_allgather(part: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """part (own chunk,), which may be out's own chunk -> out (n,), any n. Collective over group.

    Everyone, the owner included, gets the decoded values. Raises StallError, CodecError.
    """
    chunks = [chunk_range(out.numel(), group.size, rank) for rank in range(group.size)]
    start, end = chunks[group.rank]
    if part.data_ptr() != out[start:].data_ptr():
        out[start:end].copy_(part)
    length = whole_blocks(ROUND_VALUES // group.size, codec.block)
    longest = max(end - start for start, end in chunks)
    for segment in range(-(-longest // length) if group.size > 1 else 0):
        _gather(out, [segment_range(*chunk, length, segment) for chunk in chunks], group, codec)


def _gather(out: torch.Tensor, parts: list[tuple[int, int]], group: Group, codec: Codec) -> None:
    size, rank = group.size, group.rank
    order = [(rank + i) % size for i in range(size)]
    lengths = [parts[r][1] - parts[r][0] for r in order]
    packed = Packed(group.wire, codec, lengths)
    packed.add(out[slice(*parts[rank])], out.numel() * rank + parts[rank][0])
    have = 1
    while have < size:
        count = min(have, size - have)
        to, source, coming = (rank - have) % size, (rank + have) % size, lengths[have : have + count]
        plain_bytes = sum(lengths[:count]) * out.element_size()
        what = f"{count} parts of a Bruck gather over {size} ranks, from {{}}"
        _exchange(group, packed.front(count), to, packed.room(coming), source, plain_bytes, what)
        packed.received(coming)
        have += count
    for i in range(1 if codec.lossless else 0, size):
        if lengths[i]:
            codec.decode(packed.piece(i), out[slice(*parts[order[i]])])


def bruck_alltoall(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """Block r of x (n,), n a multiple of the ranks, goes to rank r. Collective over group.

    All slots have the size of the longest encoding, so that a code of variable rate saves nothing here.
    """
    block = x.numel() // group.size
    length = whole_blocks(ROUND_VALUES // group.size, codec.block)
    for first in range(0, block, length):
        _turn(x.view(group.size, block), out.view(group.size, block), slice(first, first + length), group, codec)


def _turn(x: torch.Tensor, out: torch.Tensor, part: slice, group: Group, codec: Codec) -> None:
    """Exchange one part of all blocks. x, out: (ranks, block)."""
    size, rank = group.size, group.rank
    slot_bytes = codec.encoded_bytes(out[0, part].numel())
    rows = 1 << (size - 1).bit_length()  # those from `size` on are nobody's
    slots, leaving, coming = (
        group.wire.memory.scratch(name, rows * padded(slot_bytes)).view(rows, -1)
        for name in ("slots", "leaving", "coming")
    )
    for i in range(1, size):
        peer = (rank + i) % size
        data = codec.encode(x[peer, part], slots[i], (rank * size + peer) * x.shape[1] + part.start)
        if data.data_ptr() != slots[i].data_ptr():
            slots[i, : data.numel()].copy_(data)
    group.wire.memory.before_receive(slots)  # what lies on the host is moved about by the CPU
    for distance in (1 << level for level in range((size - 1).bit_length())):
        # slots whose number has this bit, the lowest first: a view, for a device's host would wait for a list of them
        chosen, shape = slots.view(-1, 2, distance, slots.shape[1])[:, 1], (-1, distance, slots.shape[1])
        count = sum(bool(i & distance) for i in range(size))
        sent, landing = leaving[:count], coming[:count]
        leaving[: rows // 2].view(shape).copy_(chosen)
        to, source = (rank + distance) % size, (rank - distance) % size
        plain_bytes = count * out[0, part].nbytes
        what = f"{count} blocks of a Bruck turn, from {{}}"
        _exchange(group, sent.view(-1), to, landing.view(-1), source, plain_bytes, what)
        chosen.copy_(coming[: rows // 2].view(shape))
        if not coming.is_cpu:  # no codec notes this, and the next turn's bytes come to the same place
            group.wire.memory.record(coming)
    out[rank, part].copy_(x[rank, part])
    for i in range(1, size):
        values = out[(rank - i) % size, part]
        codec.decode(slots[i, : codec.used_bytes(slots[i], values.numel())], values)


def _exchange(
    group: Group, data: torch.Tensor, to: int, landing: torch.Tensor, source: int, plain_bytes: int, what: str
) -> None:
    group.wire.exchange(group.comm, data, to, landing, source, plain_bytes, lambda: what.format(group.name(source)))
