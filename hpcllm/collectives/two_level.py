"""`two_level`: exact inside a node, between nodes through the codec.

    2 nodes of 3 and 2 ranks: 2 lanes, x in 2 slices
                     1 node's sum       2 two_step between peers      3 slices to the node
    node 0  place 0  [s0+][    ]  ----\\  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --\\  | [    ][s1++]                 [s0++][s1++]
            place 2  [    ][    ]   |  | [    ][    ]                 [s0++][s1++]
    node 1  place 0  [s0+][    ]  --|-/  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --/    [    ][s1++]                 [s0++][s1++]

A node sends 2 (nodes - 1) / nodes of x through the codec, whatever its ranks; each pair of nodes exchanges messages on
all lanes at once. Places beyond the smallest node's talk to no other node.

Arrays on the CPU: 1 and 3 go through memory that the ranks of a node share (node.py). Arrays on a device: by
messages, 1 is the reduce-scatter of two_step and 3 the all-gather of ring, both raw; the same sums in the same order.

Same bits everywhere: peers end with the same decoded bytes (two_step), and the node copies them. A 16-bit x is rounded
once more than in two_step, at the node's sum.
Source: Bayatpour et al. 2017, "Scalable reduction collectives with data partitioning-based multi-leader design".
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.codecs.casts import Raw
from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group, make_group
from hpcllm.collectives.node import node_of, slices
from hpcllm.collectives.ring import ring_allgather
from hpcllm.collectives.two_step import two_step_allreduce, two_step_reduce_scatter


def two_level_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) fp32, bf16 or fp16 over the group in place. Collective over group. On one node the codec is not used.

    Raises ValueError if the ranks of a node bring different lengths, StallError, CodecError.
    """
    if group.size == 1 or x.numel() == 0:
        return
    if group.nodes == group.size:
        two_step_allreduce(x, group, codec)
    elif group.nodes > 1:
        _through_lanes(x, group, codec)
    elif x.is_cpu:
        node_of(group).allreduce(x)
    else:
        two_step_allreduce(x, group, group.wire.memory.staged(Raw(x.dtype)))


def prepare(group: Group, on_cpu: bool = True) -> None:
    """Make the memory and communicators that the first collectives would make. Collective over group.

    For a group that a thread will use: not every MPI library can make windows in two threads at once. on_cpu: where the
    arrays will be.
    """
    if group.nodes < group.size and on_cpu:
        node_of(group)
    if 1 < group.nodes < group.size and not on_cpu:
        neighbours_of(group)
    if 1 < group.nodes < group.size and group.node.rank < group.lanes:
        peers_of(group)


def _through_lanes(x: torch.Tensor, group: Group, codec: Codec) -> None:
    cuts = slices(x.numel(), group.lanes, group.node.size)
    if not x.is_cpu:
        _by_messages(x, [(int(start), int(end)) for start, end in pairwise(cuts)], group, codec)
        return
    node = node_of(group)
    rows = node.reduce(x, cuts)
    if node.rank < group.lanes:
        start, end = cuts[node.rank : node.rank + 2]
        two_step_allreduce(x[start:end], peers_of(group), codec)
    node.gather(x, cuts, rows)


def _by_messages(x: torch.Tensor, chunks: list[tuple[int, int]], group: Group, codec: Codec) -> None:
    """chunks: first value and end of each node rank's slice."""
    node, wire = neighbours_of(group), group.wire
    start, end = chunks[node.rank]
    own = wire.memory.workspace("two_level slice", end - start, x.dtype)
    two_step_reduce_scatter(x, own, node, wire.memory.staged(Raw(x.dtype)), chunks)
    if node.rank < group.lanes:
        two_step_allreduce(own, peers_of(group), codec)
    x[start:end].copy_(own)
    ring_allgather(x[start:end], x, node, wire.memory.staged(Raw(x.dtype)), chunks)


def peers_of(group: Group) -> Group:
    """This rank and its peers on the other nodes as a Group of one rank a node. Collective over the peers at first."""
    return _kept_with(group.peers, group, MPI.COMM_SELF)


def neighbours_of(group: Group) -> Group:
    """The ranks of this node as a Group. Collective over them at first."""
    return _kept_with(group.node, group, group.node)


def _kept_with(comm: MPI.Intracomm, group: Group, node: MPI.Intracomm) -> Group:
    """The Group that is kept with comm, whose ranks are a part of the group; made at the first call."""
    kept: Any = comm.Get_attr(_KEY)
    part: Group = kept or make_group(comm, node)
    part.wire = group.wire  # one account of bytes, one limit of waits
    if not kept:
        comm.Set_attr(_KEY, part)
        group.at_free.append(part.free)
    return part


_KEY = MPI.Comm.Create_keyval()
