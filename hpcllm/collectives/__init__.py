"""Collectives over (array, communicator, codec): MPI moves bytes, we reduce. They know no model.

operations.py has the front doors; each algorithm is one short file. cost.py is pure; the rest imports torch and MPI,
and does so when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcllm.collectives.group import Group, group_of
    from hpcllm.collectives.nonblocking import Handle, iallgather, iallreduce, ialltoall, ibroadcast, ireduce_scatter
    from hpcllm.collectives.operations import allgather, allreduce, alltoall, broadcast, chunk_range, reduce_scatter
    from hpcllm.collectives.two_level import prepare
    from hpcllm.collectives.window import shared_zeros

_HOME = {
    **dict.fromkeys(("Group", "group_of"), "group"),
    **dict.fromkeys(
        ("Handle", "iallgather", "iallreduce", "ialltoall", "ibroadcast", "ireduce_scatter"), "nonblocking"
    ),
    **dict.fromkeys(("allgather", "allreduce", "alltoall", "broadcast", "chunk_range", "reduce_scatter"), "operations"),
    "prepare": "two_level",
    "shared_zeros": "window",
}
__all__ = [
    "Group", "Handle", "allgather", "allreduce", "alltoall", "broadcast", "chunk_range", "group_of", "iallgather",
    "iallreduce", "ialltoall", "ibroadcast", "ireduce_scatter", "prepare", "reduce_scatter", "shared_zeros",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hpcllm.collectives.{_HOME[name]}"), name)
