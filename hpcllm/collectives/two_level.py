"""`two_level`: exact inside a node, through memory that its ranks share; through the codec between nodes.

    2 nodes of 3 and 2 ranks: 2 lanes, x in 2 slices
                     1 node's sum       2 two_step between peers      3 slices to the node
    node 0  place 0  [s0+][    ]  ----\\  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --\\  | [    ][s1++]                 [s0++][s1++]
            place 2  [    ][    ]   |  | [    ][    ]                 [s0++][s1++]
    node 1  place 0  [s0+][    ]  --|-/  [s0++][    ]                 [s0++][s1++]
            place 1  [    ][s1+]  --/    [    ][s1++]                 [s0++][s1++]

A node sends 2 (nodes - 1) / nodes of x through the codec, whatever its ranks; each pair of nodes exchanges messages on
all lanes at once. Places beyond the smallest node's talk to no other node.

Same bits everywhere: peers end with the same decoded bytes (two_step), and the node copies them. A 16-bit x is rounded
once more than in two_step, at the node's sum.
Source: Bayatpour et al. 2017, "Scalable reduction collectives with data partitioning-based multi-leader design".
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.group import Group, make_group
from hpcllm.collectives.node_window import node_of, slices
from hpcllm.collectives.two_step import two_step_allreduce


def two_level_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) fp32, bf16 or fp16 over the group in place. Collective over group. On one node the codec is not used.

    Raises ValueError if the ranks of a node bring different lengths, StallError, CodecError.
    """
    if group.size == 1 or x.numel() == 0:
        return
    if group.nodes == group.size:
        two_step_allreduce(x, group, codec)
    elif group.nodes == 1:
        node_of(group).allreduce(x)
    else:
        _through_lanes(x, group, codec)


def prepare(group: Group) -> None:
    """Make the memory and communicators that the first collectives would make. Collective over group.

    For a group that a thread will use: not every MPI library can make windows in two threads at once.
    """
    if group.nodes < group.size:
        node_of(group)
    if 1 < group.nodes < group.size and group.node.rank < group.lanes:
        peers_of(group)


def _through_lanes(x: torch.Tensor, group: Group, codec: Codec) -> None:
    node = node_of(group)
    cuts = slices(x.numel(), group.lanes, node.ranks)
    rows = node.reduce(x, cuts)
    if node.rank < group.lanes:
        start, end = cuts[node.rank : node.rank + 2]
        two_step_allreduce(x[start:end], peers_of(group), codec)
    node.gather(x, cuts, rows)


def peers_of(group: Group) -> Group:
    """This rank and its peers on the other nodes as a Group of one rank a node. Collective over the peers at first."""
    kept: Any = group.peers.Get_attr(_KEY)
    peers: Group = kept or make_group(group.peers, MPI.COMM_SELF)
    peers.wire = group.wire  # one account of bytes, one limit of waits
    if not kept:
        group.peers.Set_attr(_KEY, peers)
        group.at_free.append(peers.free)
    return peers


_KEY = MPI.Comm.Create_keyval()
