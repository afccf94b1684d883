"""`two_level`: exact inside a node, between nodes through the codec, both at the same time.

    2 nodes of 3 and 2 ranks: 2 lanes, x in 2 slices
                     1 node's sum       2 sum between peers           3 slices to the node
    node 0  place 0  [s0+][    ]  ----\\  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --\\  | [    ][s1++]                 [s0++][s1++]
            place 2  [    ][    ]   |  | [    ][    ]                 [s0++][s1++]
    node 1  place 0  [s0+][    ]  --|-/  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --/    [    ][s1++]                 [s0++][s1++]

A node sends 2 (nodes - 1) / nodes of x through the codec, whatever its ranks; each pair of nodes exchanges messages on
all lanes at once. Places beyond the smallest node's talk to no other node. Peers sum in two steps, many of them in a
grid.

Arrays on the CPU: 1 and 3 go through memory that the ranks of a node share (node_stream.py), strip by strip, so that
only the first strip's node sum and the last one's gathering stand beside an idle wire:

    turn    0    1    2    3    4    5    6        7        8     9          8 strips, DEPTH 6
    node    +0   +1   +2   +3   +4   +5   +6 g0    +7 g1    g2    g3 ...     + node's sum of a strip, g its gathering
    wire      w0   w1   w2   w3   w4   w5   w6       w7                      several strips are on their way at once

Arrays on a device: by messages, 1 is the reduce-scatter of two_step and 3 the all-gather of ring, both raw; the same
sums in the same order.

Same bits everywhere: peers end with the same decoded bytes (two_step, grid), and the node copies them. A 16-bit x is
rounded once more than in two_step, at the node's sum.
Source: Bayatpour et al. 2017, "Scalable reduction collectives with data partitioning-based multi-leader design".
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives import grid, node, two_step
from hpcllm.collectives.group import Group, make_group
from hpcllm.collectives.node_stream import NodeStream
from hpcllm.collectives.ring import ring_allgather
from hpcllm.collectives.strips import lane_pieces, takes_grid


def two_level_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) fp32, bf16 or fp16 over the group in place. Collective over group. On one node the codec is not used.

    Raises ValueError if the ranks of a node bring different lengths, StallError, CodecError.
    """
    if group.size == 1 or x.numel() == 0:
        return
    if group.nodes == group.size:
        _between_nodes(x, group, codec)
    elif group.nodes > 1:
        _through_lanes(x, group, codec)
    elif x.is_cpu:
        node.node_of(group).allreduce(x)
    else:
        two_step.two_step_allreduce(x, group, group.wire.memory.staged(Raw(x.dtype)))


def prepare(group: Group, on_cpu: bool = True) -> None:
    """Make the memory and communicators that the first collectives would make. Collective over group.

    For a group that a thread will use: not every MPI library can make windows in two threads at once. on_cpu: where the
    arrays will be.
    """
    if group.nodes < group.size and on_cpu:
        node.node_of(group)
    if 1 < group.nodes < group.size and not on_cpu:
        neighbours_of(group)
    if 1 < group.nodes < group.size and group.node.rank < group.lanes:
        peers_of(group)


def _through_lanes(x: torch.Tensor, group: Group, codec: Codec) -> None:
    cuts = node.slices(x.numel(), group.lanes, group.node.size)
    if not x.is_cpu:
        _by_messages(x, [(int(start), int(end)) for start, end in pairwise(cuts)], group, codec)
        return
    longest = int(np.diff(cuts).max())
    capacity = node.SLOT_BYTES // max(group.node_sizes) // x.itemsize
    piece, pieces = lane_pieces(longest, group.nodes, codec.block, capacity)
    stream = NodeStream(node.node_of(group), x, cuts, piece, pieces)
    turns: Iterator[None] = iter(())
    depth = _depth(group)
    if group.node.rank < group.lanes:
        start, end = cuts[group.node.rank : group.node.rank + 2]
        turns = _turns(x[start:end], peers_of(group), codec, piece * pieces)
    strips = -(-longest // (piece * pieces))
    for turn in range(strips + depth):
        if turn < strips:
            stream.reduce(turn)
        next(turns, None)
        if turn >= depth:
            stream.gather(turn - depth)
    next(turns, None)  # to its end
    stream.close()


def _between_nodes(x: torch.Tensor, peers: Group, codec: Codec) -> None:
    """Sum x over ranks of which each is on a node of its own."""
    for _ in _turns(x, peers, codec):
        pass


def _turns(x: torch.Tensor, peers: Group, codec: Codec, length: int = 0) -> Iterator[None]:
    turns = grid.grid_turns if takes_grid(peers.size) else two_step.two_step_turns
    return turns(x, peers, codec, length)


def _depth(group: Group) -> int:
    return grid.DEPTH if takes_grid(group.nodes) else two_step.DEPTH


def _by_messages(x: torch.Tensor, chunks: list[tuple[int, int]], group: Group, codec: Codec) -> None:
    """chunks: first value and end of each node rank's slice."""
    neighbours, wire = neighbours_of(group), group.wire
    start, end = chunks[neighbours.rank]
    own = wire.memory.workspace("two_level slice", end - start, x.dtype)
    two_step.two_step_reduce_scatter(x, own, neighbours, wire.memory.staged(Raw(x.dtype)), chunks)
    if neighbours.rank < group.lanes:
        _between_nodes(own, peers_of(group), codec)
    x[start:end].copy_(own)
    ring_allgather(x[start:end], x, neighbours, wire.memory.staged(Raw(x.dtype)), chunks)


def peers_of(group: Group) -> Group:
    """This rank and its peers on the other nodes as a Group of one rank a node. Collective over the peers at first."""
    return _kept_with(group.peers, group, MPI.COMM_SELF)


def neighbours_of(group: Group) -> Group:
    """The ranks of this node as a Group. Collective over them at first."""
    return _kept_with(group.node, group, group.node)


def _kept_with(comm: MPI.Intracomm, group: Group, on_node: MPI.Intracomm) -> Group:
    """The Group that is kept with comm, whose ranks are a part of the group; made at the first call."""
    kept: Any = comm.Get_attr(_KEY)
    part: Group = kept or make_group(comm, on_node)
    part.wire = group.wire  # one account of bytes, one limit of waits
    if not kept:
        comm.Set_attr(_KEY, part)
        group.at_free.append(part.free)
    return part


_KEY = MPI.Comm.Create_keyval()
