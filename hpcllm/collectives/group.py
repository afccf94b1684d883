"""Ranks of a communicator and what is kept with them: nodes, memory, plans; found out once.

    comm (the caller's)  --attribute-->  Group:  comm      a copy of its own, so no message meets the caller's
                                                 node      the ranks that share this rank's memory
                                                 peers     one rank of each node: those with the same place in theirs
                                                 wire      memory, limits, counters

    node 0:  rank 0  rank 3  rank 4        places 0 1 2        peers of place 0:  ranks 0, 1
    node 1:  rank 1  rank 2                places 0 1          lanes = 2, the places that every node has

Nodes are numbered by their lowest rank. A node is crowded if its ranks cannot have a hardware thread each, by the masks
that the launcher gave them: then a rank that waits for another may hold it up. Of several nodes rank 0 looks how fast
its network interfaces are.

The first collective on a communicator is where the Group is made, so that one is slower, and collective even where its
algorithm is not. Freeing the communicator frees the Group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from hpcllm.collectives.tuning import Shape, Tuning
from hpcllm.collectives.wire import Wire
from hpcllm.errors import CollectiveError
from hpcllm.mpi.meeting_comm import plain
from hpcllm.mpi.wait import name_rank
from hpcllm.system.hardware.node import allowed_cores
from hpcllm.system.hardware.pci_devices import find_nics, wire_gb_s

MASK_BYTES = 1024  # of 8192 hardware threads, the most that Linux is built for


@dataclass(eq=False)
class Group:
    """One communicator as the collectives use it."""

    comm: MPI.Intracomm
    node: MPI.Intracomm
    peers: MPI.Intracomm  # for places below `lanes`, rank in it = number of the node
    node_sizes: tuple[int, ...]  # ranks on each node
    crowded: bool = False  # one of the nodes at least
    wire_gb_s: float | None = None  # each way of a node to others, on all ranks as rank 0's says; None: not known
    wire: Wire = field(default_factory=Wire)
    plans: dict[Any, Any] = field(default_factory=dict)  # plans of auto.py
    ready_calls: dict[Any, Any] = field(default_factory=dict)  # of library_calls.py, as those plans say
    tuning: Tuning | None = None  # measured rates that auto.py decides by; None: its rules
    shared_arrays: int = 0  # made by shared_zeros over it and not yet freed: as many on every rank
    at_free: list[Callable[[], None]] = field(default_factory=list)  # called in reverse order: windows and the like
    broken: str = ""  # why: a collective that failed half-way left messages behind
    _backgrounds: dict[str, Group] = field(default_factory=dict)  # by lane

    def __post_init__(self) -> None:
        self.rank, self.size = self.comm.rank, self.comm.size

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def lanes(self) -> int:
        """Places that every node has a rank for."""
        return min(self.node_sizes)

    @property
    def shape(self) -> Shape:
        return Shape(self.size, self.nodes, self.lanes, self.crowded)

    def name(self, rank: int) -> str:
        """'rank 5', as the whole job counts: for error messages."""
        return name_rank(self.comm, rank)

    def background(self, lane: str) -> Group:
        """A Group of these ranks with messages and memory of the lane's own, for nonblocking.py.

        A lane's first call is collective.
        """
        if lane not in self._backgrounds:
            group = self._backgrounds[lane] = make_group(self.comm, self.node)
            group.wire.waits.limit_s = self.wire.waits.limit_s
            group.use_tuning(self.tuning)
        return self._backgrounds[lane]

    def use_tuning(self, tuning: Tuning | None) -> None:
        """Let `auto` decide by these rates from now on, None: by rule. The same on all ranks."""
        self.tuning = tuning
        self.choose_anew()
        for group in self._backgrounds.values():
            group.use_tuning(tuning)

    def choose_anew(self) -> None:
        """Let `auto` choose again from the next calls on. The same on all ranks."""
        self.plans.clear()
        self.ready_calls.clear()

    def check(self) -> None:
        """Raise CollectiveError if an earlier collective failed here: the next would take its messages for its own."""
        if self.broken:
            raise CollectiveError(
                f"{self.name(self.rank)}: an earlier collective on this communicator failed ({self.broken}), and its "
                "messages may still arrive; go on with a new communicator, comm.Dup()"
            )

    def free(self) -> None:
        """Free the communicators and what was kept with them. Collective over comm."""
        for group in self._backgrounds.values():
            group.free()
        while self.at_free:
            self.at_free.pop()()
        for comm in (self.peers, self.node, self.comm):
            if comm != MPI.COMM_NULL:
                comm.Free()


def make_group(comm: MPI.Intracomm, node: MPI.Intracomm | None = None) -> Group:
    """A Group of comm's ranks. Collective over comm.

    node: the ranks of comm that count as one node, as a communicator; found out from who shares memory if not given.
    """
    own = comm.Dup()
    node = node.Dup() if node else cast(MPI.Intracomm, own.Split_type(MPI.COMM_TYPE_SHARED, own.rank))
    lowest = np.array([own.rank])
    node.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    found = np.zeros(own.size + 2, dtype=np.int64)  # size of the node whose lowest rank it is; ranks on crowded nodes
    found[own.rank] = node.size if own.rank == lowest[0] else 0
    found[-2] = are_crowded(_cores_of_all(node))
    if own.rank == 0 and node.size < own.size:
        found[-1] = round(1e9 * (wire_gb_s(find_nics()) or 0))  # bytes a second
    own.Allreduce(MPI.IN_PLACE, found)
    sizes, crowded, wire = found[:-2], bool(found[-2]), found[-1] / 1e9 or None
    number = np.count_nonzero(sizes[: lowest[0]])
    peers = cast(MPI.Intracomm, own.Split(node.rank, int(number)))
    return Group(plain(own), plain(node), plain(peers), tuple(sizes[sizes > 0].tolist()), crowded, wire)


def are_crowded(cores: Sequence[Collection[int]]) -> bool:
    """True if ranks that may run on these hardware threads cannot have one each: by a matching of both. Pure."""
    taken: dict[int, int] = {}  # hardware thread -> rank

    def place(rank: int, tried: set[int]) -> bool:
        for core in sorted(cores[rank], key=taken.__contains__):  # free ones first
            if core not in tried:
                tried.add(core)
                if core not in taken or place(taken[core], tried):
                    taken[core] = rank
                    return True
        return False

    return len(set().union(*cores)) < len(cores) or not all(place(rank, set()) for rank in range(len(cores)))


def _cores_of_all(node: MPI.Intracomm) -> list[list[int]]:
    """Gather the hardware threads that each rank of a node may run on. Collective over node."""
    mask = np.zeros(8 * MASK_BYTES, dtype=np.uint8)
    mask[list(allowed_cores())] = 1
    masks = np.empty((node.size, MASK_BYTES), dtype=np.uint8)
    node.Allgather(np.packbits(mask), masks)
    return [np.flatnonzero(np.unpackbits(row)).tolist() for row in masks]


def group_of(comm: MPI.Intracomm | Group) -> Group:
    """The Group that is kept with comm; made if this is the first call, which is then collective over comm."""
    if isinstance(comm, Group):
        return comm
    asked, group = _latest[0]
    if group and comm is asked:  # to ask MPI for an attribute takes as long as all checks of a small call
        return group
    kept = comm.Get_attr(_KEY)
    if isinstance(kept, Group):
        group = kept
    else:
        group = make_group(comm)
        comm.Set_attr(_KEY, group)
    _latest[0] = comm, group
    return group


def _free_with(_comm: MPI.Comm, _key: int, group: Group) -> None:
    """MPI calls this when the caller's communicator is freed; at MPI_Finalize everything goes anyway."""
    if _latest[0][1] is group:
        _latest[0] = None, None
    if not MPI.Is_finalized():
        group.free()


_KEY = MPI.Comm.Create_keyval(delete_fn=_free_with)
_latest: list[tuple[MPI.Intracomm | None, Group | None]] = [
    (None, None)
]  # the communicator that was asked for last, and its Group
