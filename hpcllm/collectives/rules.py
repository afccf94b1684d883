"""Which algorithm `auto` takes where nothing was measured. Pure: the selector and the planner ask the same function.

    allreduce, reduce-scatter, all-gather, of arrays on the CPU
    one node,  raw    node_window; up to 64 KiB native where waits have no limit, so that the library may block
    more,      raw    fp32 up to 64 KiB native, then two_level where ranks share nodes, else by size per rank
    a codec           two_level where ranks share nodes, else two_step

Arrays on a device share no windows: by the lines for more nodes, however many there are, with the library only up to
64 KiB: it adds up on the host and takes a whole array there at once, while ours copy parts as others are on the wire.

A wait with a limit polls, gives way and sleeps, and a library's sum moves on only when it is polled: 16 KiB between two
ranks that compute in between took 600 us native and 40 in node_window.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.collectives.choice import SUMS, library_counts
from hpcllm.collectives.rates import Shape

IN_WINDOWS = ("allreduce", "reduce_scatter", "allgather")
SMALL_BYTES = 64 << 10  # up to here latency decides, and the library's is the lowest
LONG_CHUNK_BYTES = 32 << 10  # a ring sends 2 (ranks - 1) chunks one after another: worth it from here


@dataclass(frozen=True)
class Values:
    """What a collective is asked to sum or move: those of x, of `out` for an all-gather."""

    n: int
    item_bytes: int
    dtype: str  # "float32", ...
    codec: str  # "raw", ...
    on_cpu: bool = True

    @property
    def size_bytes(self) -> int:
        return self.n * self.item_bytes

    @property
    def raw(self) -> bool:
        return self.codec == "raw"

    @property
    def full(self) -> bool:
        return self.dtype == "float32"

    @property
    def small(self) -> bool:
        return self.size_bytes <= SMALL_BYTES


def by_rule(operation: str, x: Values, shape: Shape, may_block: bool) -> str:
    """The algorithm for x over ranks that lie on nodes as shape says. may_block: whether waits have no limit."""
    if x.raw and shape.nodes == 1 and operation in IN_WINDOWS and x.on_cpu:
        may_ask_library = operation not in SUMS or x.full
        return "native" if x.small and may_ask_library and may_block else "node_window"
    if operation == "allreduce":
        return _allreduce(x, shape)
    if operation == "reduce_scatter":
        return _reduce_scatter(x)
    if x.raw and library_counts(operation, x.n) and x.on_cpu:
        return "native"  # nothing to add up: the library moves bytes as well as we do
    if operation == "broadcast":
        return "binomial" if x.small or shape.ranks <= 2 else "ring"
    if operation == "alltoall":
        return "pairwise"
    return "bruck" if x.small else "ring"


def _reduce_scatter(x: Values) -> str:
    """Between nodes, or through a codec."""
    if not (x.raw and x.full):
        return "two_step"  # 16-bit sums too: it rounds once, a ring at every hop
    return "native" if x.small else "ring"


def _allreduce(x: Values, shape: Shape) -> str:
    """Between nodes, or through a codec."""
    if x.raw and x.full and x.small:
        return "native"
    if 1 < shape.nodes < shape.ranks and not (x.raw and x.small):
        return "two_level"
    if not x.raw:
        return "two_step"
    if x.small:
        return "recursive_doubling"
    if not x.full:
        return "two_step"
    return "ring" if x.size_bytes // shape.ranks >= LONG_CHUNK_BYTES else "rabenseifner"
