"""`node_window`: the ranks of one node work in memory that they share; no messages. node.py has the window.

                allreduce, x shared       reduce-scatter, x shared           all-gather, out shared
    rank 0      [sum0][ <- ][ <- ]        [ x0 ][ x1 ][ x2 ]  out 0 = sum    [ p0 ][ <- ][ <- ]   every rank copies the
    rank 1      [ <- ][sum1][ <- ]        [ x0 ][ x1 ][ x2 ]  of all x0,     [ <- ][ p1 ][ <- ]   others' parts from
    rank 2      [ <- ][ <- ][sum2]        [ x0 ][ x1 ][ x2 ]  in rank order  [ <- ][ <- ][ p2 ]   where they are

Arrays anywhere else go through the slots of node_kernels.py, those of a few KiB in one step. Every sum is made in rank
order: the same bits each way.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.codecs.protocol import Codec
from hpcllm.collectives.arrays import overlap
from hpcllm.collectives.group import Group
from hpcllm.collectives.node import GATHER_CHUNKS, SUM_CHUNKS, Node, node_of
from hpcllm.collectives.node_kernels import KINDS, copy
from hpcllm.collectives.row_sums import sum_rows
from hpcllm.mpi.partition import chunk_range


def node_window_allreduce(x: torch.Tensor, group: Group, codec: Codec) -> None:
    """Sum x (n,) fp32, bf16 or fp16 over the ranks of one node in place. Collective over group.

    Raises ValueError on all ranks if they bring different lengths, with several nodes, or with a codec other than raw.
    """
    _check_suits(group, codec, "two_level", "two_step")
    if group.size > 1 and x.numel() > 0:
        node_of(group).allreduce(x)


def node_window_reduce_scatter(x: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """x (n,) fp32, bf16 or fp16 -> out: this rank's chunk of the sum over the ranks of one node, or that chunk of x.

    Collective over group.

    Raises ValueError on all ranks if they bring different lengths, with several nodes, or with a codec other than raw.
    """
    _check_suits(group, codec, "two_step", "two_step")
    if group.size == 1:
        out.copy_(x)
    elif x.numel() > 0:
        # the sum of a chunk begins with rank 0's addend, where this rank's own may still be wanted
        total = group.wire.memory.workspace("sum", out.numel(), out.dtype) if overlap(x, out) else out
        _sum_chunks(x, total, node_of(group))
        if total is not out:
            out.copy_(total)


def node_window_allgather(part: torch.Tensor, out: torch.Tensor, group: Group, codec: Codec) -> None:
    """Every rank's part -> its chunk of out (n,) on the ranks of one node, any dtype. Collective over group.

    Raises ValueError on all ranks if they bring different lengths, with several nodes, or with a codec other than raw.
    """
    _check_suits(group, codec, "ring", "ring")
    if group.size == 1:
        out.copy_(part)
    elif out.numel() > 0:
        _gather_chunks(
            part.view(torch.uint8), out.view(torch.uint8), _cuts(out, group.size) * out.itemsize, node_of(group)
        )


def _check_suits(group: Group, codec: Codec, between_nodes: str, with_codec: str) -> None:
    """Raise ValueError, with the algorithm to use, where the ranks share no node or values are to be encoded."""
    if group.nodes > 1:
        raise ValueError(
            f"node_window works inside one node, and these ranks are on {group.nodes}; use {between_nodes}"
        )
    if codec.name != "raw":
        raise ValueError(f"node_window sends nothing that codec {codec.name} could encode; use raw, or {with_codec}")


def _sum_chunks(x: torch.Tensor, out: torch.Tensor, node: Node) -> None:
    cuts = _cuts(x, node.ranks)
    start, to = int(cuts[node.rank]) * x.itemsize, np.array([out.data_ptr()], dtype=np.uint64)
    if x.nbytes <= node.small_bytes:
        sum_rows(KINDS[x.dtype], node.bring(x, x, SUM_CHUNKS) + np.uint64(start), to, 0, out.numel())
        return
    node.run(x, cuts, x.data_ptr() + start, out.data_ptr(), SUM_CHUNKS)


def _gather_chunks(part: torch.Tensor, out: torch.Tensor, cuts: NDArray[np.int64], node: Node) -> None:
    """part, out: bytes, cut at `cuts` counted in bytes."""
    to = out.data_ptr()
    if int(np.diff(cuts).max()) <= node.small_bytes:
        rows = node.bring(out, part, GATHER_CHUNKS)
        for owner in range(node.ranks):
            copy(to + int(cuts[owner]), int(rows[owner]), int(cuts[owner + 1] - cuts[owner]))
        return
    node.run(out, cuts, part.data_ptr(), to + int(cuts[node.rank]), GATHER_CHUNKS)


def _cuts(x: torch.Tensor, ranks: int) -> NDArray[np.int64]:
    """(ranks + 1,) first values of the ranks' chunks of x."""
    return np.array([chunk_range(x.numel(), ranks, rank)[0] for rank in range(ranks)] + [x.numel()], dtype=np.int64)
