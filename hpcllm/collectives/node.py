"""Ranks of one node and the window of shared memory through which they sum and gather, without messages.

    x in a shared array (window.py)            x anywhere                     x of a few KiB
    enter: all are here, at the same place     enter                          copy x in, enter
    each rank: its slice of all rows,          node_kernels.py: pieces        each rank: all of
      rank 0  [ sum ][     ][     ]            through small slots            all rows into its x
      rank 1  [ sum ][     ][     ]
      rank 2  [ sum ][     ][     ]
      ^ read and written by rank 0, once
    leave: all are done

Sums run in rank order in fp32 and are rounded once, so the three ways give the same bits. Memory traffic of a shared
array of N bytes: N read and N written by each rank, the least there can be.
Shared windows: Hoefler et al. 2013, "MPI + MPI: a new hybrid approach to parallel programming with MPI plus shared
memory".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.collectives import node_kernels as kernels
from hpcllm.collectives.group import Group
from hpcllm.collectives.row_sums import sum_rows
from hpcllm.collectives.window import PAGE_BYTES, Window, allocate_window, find_window
from hpcllm.mpi.wait import name_rank

SMALL_BYTES = 64 << 10  # what a rank reads at most in the way of a single step
SLOT_BYTES = 512 << 10
SPINS = 300  # looks before giving way, under a microsecond: a rank without a core may need this one
HOPS, LOOKS = 96, 300_000  # of a token that tells how far the cores are from each other; all looks take 100 us
FAR_HOP_S = 140e-9  # a hop inside a shared cache takes 60 ns, from one cache to another 200 and more
BYTES_PER_RELAY = 32 << 20  # the kernel moves ranks about
SLICE_VALUES = 1024  # slices begin at whole pages, or nearly: two ranks never write one cache line

SUM, REDUCE, GATHER, SUM_CHUNKS, GATHER_CHUNKS = range(5)
TASKS = {
    SUM: "the sum of",
    REDUCE: "the two-level sum of",
    GATHER: "the two-level gathering of",
    SUM_CHUNKS: "the reduce-scatter of",
    GATHER_CHUNKS: "the all-gather of",
}
REDUCING, GATHERING = (SUM, REDUCE, SUM_CHUNKS), (SUM, GATHER, GATHER_CHUNKS)


class Node:
    """The window through which the ranks of a group's node work, and how far their calls are."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.shares: dict[int, bool] = {}  # by number of a window
        self.rank, self.ranks = group.node.rank, group.node.size
        self.small_bytes = SMALL_BYTES // self.ranks // 64 * 64
        counters_bytes = -(-self.ranks * kernels.RANK_BYTES // PAGE_BYTES) * PAGE_BYTES
        self.window = allocate_window(counters_bytes + 2 * self.small_bytes + kernels.SLOTS * SLOT_BYTES, group)
        parts = self.window.addresses
        self.flags = int(parts[0])
        self.small = [parts + np.uint64(counters_bytes + turn * self.small_bytes) for turn in range(2)]
        self.slots = parts + np.uint64(counters_bytes + 2 * self.small_bytes)
        self.calls = self.segments = self.hops = 0
        self.far, self.since_relay_bytes = False, BYTES_PER_RELAY

    def allreduce(self, x: torch.Tensor) -> None:
        """x (n,), n > 0, becomes its sum over the node."""
        if x.nbytes <= self.small_bytes:  # everyone reads everything, one meeting instead of two
            rows, to = self.bring(x, x, SUM), np.array([x.data_ptr()], dtype=np.uint64)
            sum_rows(kernels.KINDS[x.dtype], rows, to, 0, x.numel())
            return
        cuts = slices(x.numel(), self.ranks, self.ranks)
        own = self._own(x, cuts)
        self.run(x, cuts, own, own, SUM)

    def run(self, x: torch.Tensor, cuts: NDArray[np.int64], own: int, result: int, task: int) -> None:
        """One call: slices of x (cut at `cuts`, one a rank) are summed by their owners, or gathered from them, or both.

        own, result: addresses of this rank's slice, before and after.
        """
        window, offset = self.enter(x, task)
        if window is None:
            self.exchange(x, cuts, own, result, task)
            return
        n = int(cuts[self.rank + 1] - cuts[self.rank])
        if task in REDUCING:
            rows = window.addresses + np.uint64(offset + int(cuts[self.rank]) * x.itemsize)
            to = rows if task in GATHERING else np.array([result], dtype=np.uint64)
            sum_rows(kernels.KINDS[x.dtype], rows, to, 0, n)
        else:
            if own != result:
                kernels.copy(result, own, n * x.itemsize)
            self.collect(x, lambda owner: cuts[owner : owner + 2] * x.itemsize, window.addresses, offset, task)
        self.meet(kernels.LEFT, task)

    def _own(self, x: torch.Tensor, cuts: NDArray[np.int64]) -> int:
        """Address of this rank's slice of x."""
        return x.data_ptr() + int(cuts[self.rank]) * x.itemsize

    def collect(
        self, x: torch.Tensor, part_of: Callable[[int], Iterable[int]], rows: NDArray[np.uint64], offset: int, task: int
    ) -> None:
        """Copy the others' parts of x from their places in a window, once all owners are done with theirs.

        part_of: first byte and end in x of the part that a rank of the node owns.
        """
        self.meet(kernels.BETWEEN, task)
        for other in range(self.rank + 1, self.rank + self.ranks):  # all begin at different owners
            owner = other % self.ranks
            start, end = map(int, part_of(owner))
            kernels.copy(x.data_ptr() + start, int(rows[owner]) + offset + start, end - start)

    def enter(self, x: torch.Tensor, task: int) -> tuple[Window | None, int]:
        """Meet the others at the begin of a call; the window that all ranks' x are in and the offset, or None."""
        window, offset = find_window(x.data_ptr(), x.nbytes)
        if window is not None and not self._shares(window):
            window, offset = None, 0
        self._enter(x, task, window.number if window else 0, offset)
        return (window, offset) if self._agree() else (None, 0)

    def _shares(self, window: Window) -> bool:
        """True if the window's ranks are those of this node, in the same order: it may be of another Group."""
        if window.number not in self.shares:
            relation = MPI.Comm.Compare(window.node, self.group.node)
            self.shares[window.number] = relation in (MPI.IDENT, MPI.CONGRUENT)
        return self.shares[window.number]

    def _far(self, size_bytes: int) -> bool:
        """True if the node's ranks share no cache, as the time of a token tells. All bring the same size_bytes."""
        self.since_relay_bytes += size_bytes
        if self.since_relay_bytes >= BYTES_PER_RELAY:
            self.since_relay_bytes = 0
            hops_s = [hop_s for hop_s in (self._hop_s() for _ in range(3)) if hop_s > 0]
            self.far = min(hops_s) > FAR_HOP_S if hops_s else self.far
        return self.far

    def _hop_s(self) -> float:
        """Seconds a hop; 0 if it gave up, as it does where ranks share a core."""
        start_s, first = time.perf_counter(), self.hops
        self.hops += max(HOPS // self.ranks, 1) * self.ranks
        arrived = kernels.relay(self.flags, self.rank, self.ranks, first, self.hops, LOOKS)
        return (time.perf_counter() - start_s) / (self.hops - first) if arrived else 0.0

    def meet(self, which: int, task: int) -> None:
        """A barrier: all ranks have posted this call's counter."""
        kernels.post(self.flags, self.rank, which, self.calls)
        self._await(which, task)

    def exchange(
        self, x: torch.Tensor, cuts: NDArray[np.int64], own: int, result: int, task: int, piece: int = 0,
        pieces: range = range(0),
    ) -> None:  # fmt: skip
        """Do what `run` does through the slots: x is in ordinary memory.

        piece, pieces: length and numbers of the pieces of each slice that take part; not given: all there are.
        """
        job = np.zeros(1, dtype=kernels.EXCHANGE)
        piece = piece or SLOT_BYTES // self.ranks // 64 * 64 // x.itemsize
        pieces = pieces or range(-(-int(np.diff(cuts).max()) // piece))
        segments, moved_bytes = len(pieces), min(x.nbytes, len(pieces) * piece * self.ranks * x.itemsize)
        job[0] = (
            self.flags, self.rank, self.ranks, kernels.KINDS[x.dtype], x.itemsize, x.data_ptr(), own, result,
            piece, pieces.start, SLOT_BYTES, self.segments, segments, task in REDUCING, task in GATHERING,
            self._far(moved_bytes), 0, 0, 0,
        )  # fmt: skip
        while job["collected"][0] < segments:
            self.group.wire.waits.until(lambda: self._advance(job, cuts), lambda: self._name_slowest(job, task))
        self.segments += segments

    def _advance(self, job: NDArray[np.void], cuts: NDArray[np.int64]) -> bool:
        """Do what can be done; true if that was anything: the next wait begins anew, with short sleeps."""
        before = self._steps(job)
        if not kernels.advance(job, self.slots, cuts, SPINS):
            self._let_messages_pass()
        return self._steps(job) > before

    def _steps(self, job: NDArray[np.void]) -> int:
        return int(job["filled"][0] + job["reduced"][0] + job["collected"][0])

    def bring(self, x: torch.Tensor, part: torch.Tensor, task: int) -> NDArray[np.uint64]:
        """Show a `part` of small_bytes at most to all; returns where the ranks' parts are until the next call but one.

        x: what the call is about, equal in length and dtype on all ranks.
        """
        rows = self.small[(self.calls + 1) % 2]
        kernels.copy(int(rows[self.rank]), part.data_ptr(), part.nbytes)
        self._enter(x, task, 0, 0)
        self._agree()
        return rows

    def _enter(self, x: torch.Tensor, task: int, window: int, offset: int) -> None:
        self.calls += 1
        said = task * len(kernels.KINDS) + kernels.KINDS[x.dtype]
        kernels.enter(self.flags, self.rank, self.calls, said, x.nbytes, window, offset)
        self._await(kernels.ENTERED, task)

    def _agree(self) -> bool:
        """True if all ranks' arrays are at the same place of the same window. Raises ValueError on all ranks alike."""
        verdict = kernels.compare(self.flags, self.ranks, self.calls)
        if verdict >= 0:
            said = [self._what(rank) for rank in (0, verdict)]
            raise ValueError(f"ranks of one node meet in different calls: {said[0]}, but {said[1]}")
        return verdict == -1 and kernels.brought(self.flags, 0, self.calls, 2) > 0

    def _await(self, which: int, task: int) -> None:
        def done() -> bool:
            if kernels.awaited(self.flags, self.ranks, which, self.calls, SPINS) < 0:
                return True
            self._let_messages_pass()
            return False

        self.group.wire.waits.until(done, lambda: self._name_late(which, task))

    def _let_messages_pass(self) -> None:
        """Enter the MPI library: a late rank may wait for a message of ours, which moves only while we are in it."""
        self.group.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)

    def _name_late(self, which: int, task: int) -> str:
        late = kernels.awaited(self.flags, self.ranks, which, self.calls, 0)
        aim = "come to" if which == kernels.ENTERED else "finish"
        return f"{name_rank(self.group.node, late)} to {aim} {self._of_node(task)}"

    def _name_slowest(self, job: NDArray[np.void], task: int) -> str:
        counts = (int(job["reduced"][0]), int(job["collected"][0]), max(int(job["filled"][0]) - kernels.SLOTS, 0))
        for which, count in zip((kernels.FILLED, kernels.REDUCED, kernels.COLLECTED), counts, strict=True):
            late = kernels.awaited(self.flags, self.ranks, which, self.segments + count + 1, 0)
            if late >= 0 and late != self.rank:
                return f"{name_rank(self.group.node, late)} in segment {count} of {self._of_node(task)}"
        return f"nobody in {self._of_node(task)}"

    def _of_node(self, task: int) -> str:
        return f"{TASKS[task]} an array over {self.ranks} ranks of one node"

    def _what(self, rank: int) -> str:
        task, kind = divmod(kernels.brought(self.flags, rank, self.calls, 0), len(kernels.KINDS))
        dtype = list(kernels.KINDS)[kind]
        n = kernels.brought(self.flags, rank, self.calls, 1) // dtype.itemsize
        return f"{name_rank(self.group.node, rank)} in {TASKS[task]} {n} values of {dtype}"


def node_of(group: Group) -> Node:
    """The Node that is kept with the group; the first call is collective over group."""
    kept: Any = group.node.Get_attr(_KEY)
    node: Node = kept or Node(group)
    if not kept:
        group.node.Set_attr(_KEY, node)
    return node


def slices(n: int, owners: int, ranks: int) -> NDArray[np.int64]:
    """(ranks + 1,) first values of the slices of n values that the first `owners` ranks own; the others' are empty."""
    blocks = -(-n // SLICE_VALUES)
    starts = np.minimum(np.arange(ranks + 1, dtype=np.int64), owners) * blocks // owners
    cuts: NDArray[np.int64] = np.minimum(starts * SLICE_VALUES, n)
    return cuts


_KEY = MPI.Comm.Create_keyval()
