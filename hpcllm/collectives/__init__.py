"""Collectives over (array, communicator, codec): MPI moves bytes, we reduce. They know no model. A reading order:

operations.py        allreduce, reduce_scatter, allgather, alltoall, broadcast; nonblocking.py, worker.py: in a thread
group.py, wire.py    ranks and nodes of a communicator; its messages and their memory; arrays.py: the caller's arrays
ring.py two_step.py grid.py doubling.py bruck.py pairwise.py broadcasts.py native.py    an algorithm or two each
strips.py, legs.py   how sums through owners cut an array, and what they send: two_step.py and grid.py
node_window.py       inside a node, with node.py, node_kernels.py, window.py
two_level.py         inside and between nodes, with node_stream.py
feedback.py          error feedback for a lossy codec
auto.py              which algorithm; selection.py: by rule or by cost.py, with rates of tuning.py that measure.py finds

selection, cost and tuning are pure; the rest imports torch and MPI when a name of this package is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcllm.collectives.group import Group, group_of
    from hpcllm.collectives.nonblocking import Handle, iallgather, iallreduce, ialltoall, ibroadcast, ireduce_scatter
    from hpcllm.collectives.operations import allgather, allreduce, alltoall, broadcast, chunk_range, reduce_scatter
    from hpcllm.collectives.two_level import prepare
    from hpcllm.collectives.window import free_shared, shared_zeros

_HOME = {
    **dict.fromkeys(("Group", "group_of"), "group"),
    **dict.fromkeys(
        ("Handle", "iallgather", "iallreduce", "ialltoall", "ibroadcast", "ireduce_scatter"), "nonblocking"
    ),
    **dict.fromkeys(("allgather", "allreduce", "alltoall", "broadcast", "chunk_range", "reduce_scatter"), "operations"),
    "prepare": "two_level",
    **dict.fromkeys(("free_shared", "shared_zeros"), "window"),
}
__all__ = [
    "Group", "Handle", "allgather", "allreduce", "alltoall", "broadcast", "chunk_range", "free_shared", "group_of",
    "iallgather", "iallreduce", "ialltoall", "ibroadcast", "ireduce_scatter", "prepare", "reduce_scatter",
    "shared_zeros",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"hpcllm.collectives.{_HOME[name]}"), name)
    return value  # found as any other name from now on: to come here takes longer than a small call's checks
