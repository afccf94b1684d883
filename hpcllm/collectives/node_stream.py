"""The two ends of a two-level sum inside a node, strip by strip: sum a strip there, later gather its result.

    lane r's slice of x      [ strip 0 | strip 1 | strip 2 ]        each lane has a slice, all are cut alike

    reduce(k)    strip k of every lane's slice becomes its sum over the node, where its owner has x
    gather(k)    strip k of every lane's slice is copied from its owner

What happens to a strip in between is the caller's, and other strips may be reduced and gathered meanwhile.
x in a shared array: the ranks meet at the begin, once for each gathering, and at the end. x elsewhere: pieces go
through the slots of the node's window, and a strip is a whole number of pieces.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpcllm.collectives import node_kernels as kernels
from hpcllm.collectives.node import GATHER, REDUCE, Node
from hpcllm.collectives.row_sums import sum_rows


class NodeStream:
    """One two-level sum of x (n,), n > 0, in slices cut at `cuts` (ranks + 1,), in strips of `pieces` x `piece` values.

    Collective over the node, as are all methods.
    """

    def __init__(self, node: Node, x: torch.Tensor, cuts: NDArray[np.int64], piece: int, pieces: int) -> None:
        self.node, self.x, self.cuts, self.piece, self.pieces = node, x, cuts, piece, pieces
        self.window, self.offset = node.enter(x, REDUCE)

    def reduce(self, strip: int) -> None:
        if self.window is None:
            self._exchange(strip, REDUCE)
            return
        start, end = self._range(self.node.rank, strip)
        rows = self.window.addresses + np.uint64(self.offset + start)
        n = (end - start) // self.x.itemsize
        sum_rows(kernels.KINDS[self.x.dtype], rows, rows[self.node.rank : self.node.rank + 1], 0, n)

    def gather(self, strip: int) -> None:
        if self.window is None:
            self._exchange(strip, GATHER)
            return
        self.node.calls += 1
        self.node.collect(self.x, lambda owner: self._range(owner, strip), self.window.addresses, self.offset, GATHER)

    def close(self) -> None:
        """Return when the others are done with my part of a shared array."""
        if self.window is not None:
            self.node.meet(kernels.LEFT, GATHER)

    def _range(self, owner: int, strip: int) -> tuple[int, int]:
        """Offsets in bytes of a strip of an owner's slice."""
        length, last = self.piece * self.pieces, int(self.cuts[owner + 1])
        start = min(int(self.cuts[owner]) + strip * length, last)
        return start * self.x.itemsize, min(start + length, last) * self.x.itemsize

    def _exchange(self, strip: int, task: int) -> None:
        own = self.x.data_ptr() + int(self.cuts[self.node.rank]) * self.x.itemsize
        longest = int(np.diff(self.cuts).max())
        begin = strip * self.pieces
        count = min(self.pieces, -(-longest // self.piece) - begin)
        self.node.exchange(self.x, self.cuts, own, own, task, self.piece, range(begin, begin + count))
