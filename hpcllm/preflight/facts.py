"""Facts of an allocation, as plain values. Pure: checks and their tests need no MPI.

Allocation -- Node n1, ranks 0-7    --.                      what ranks of one place have in common with those of
           |- Node n2, ranks 8-15   --+--> NodeFacts A       other nodes stands in NodeFacts, and is there once
           `- Node n3, ranks 16-23  -----> NodeFacts B       for all nodes that are alike
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hpcllm.system.device import DeviceFacts
from hpcllm.system.hardware.node import Hardware


@dataclass(frozen=True, kw_only=True)
class Device(DeviceFacts):
    """Device that a rank would compute on."""

    visible: int  # how many the rank sees
    identity: str  # two ranks of a node that have the same share a device
    numa: int | None  # domain it is near to
    unfit: str = ""  # why this PyTorch cannot use it
    one_process: bool = False  # its driver lets one process at a time have it (compute mode EXCLUSIVE_PROCESS)


@dataclass(frozen=True, kw_only=True)
class Library:
    """The MPI library of a process."""

    version: str  # what it says of itself, first line
    file: str  # where it was loaded from, "" if not known
    is_wheel: bool  # installed by pip
    threads: str  # SINGLE, FUNNELED, SERIALIZED or MULTIPLE
    large_counts: bool  # whether it takes a count over 2^31
    gpu_layer: bool  # whether Cray's libmpi_gtl_* is loaded

    @property
    def is_cray(self) -> bool:
        return "CRAY MPICH" in self.version.upper()


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank; equal on ranks of the same place in nodes that are alike."""

    cores: tuple[int, ...]  # hardware threads that the launcher lets it run on
    library: Library
    device: Device | None = None  # None: the CPU
    no_device: str = ""  # why PyTorch sees none
    environment: tuple[tuple[str, str], ...] = ()  # variables that matter, see collect.VARIABLES
    software: tuple[tuple[str, str], ...] = ()  # name -> version
    open_files: int = 1 << 20  # it may have open at once
    locked_bytes: int = 1 << 62  # it may lock in memory
    freed_memory: str = ""  # whether the process keeps it, in words
    fault: str = ""  # what could not be found out, and why

    def variable(self, name: str) -> str:
        return dict(self.environment).get(name, "")


@dataclass(frozen=True)
class NodeFacts:
    """Facts that do not change, of one node or of many that are alike."""

    hardware: Hardware
    ranks: tuple[RankFacts, ...]  # in the order of the job
    source: str = ""  # hash of hpcllm's own text, "" if nobody looked


@dataclass(frozen=True)
class Gauges:
    """Readings that change from moment to moment."""

    available_bytes: int = 0  # memory
    shared_free_bytes: int = 0  # of /dev/shm
    unix_s: float = 0.0  # the node's clock, read at about the same moment on all
    others_cores: float = 0.0  # of the cores of its ranks, so many are kept busy by other programs


@dataclass(frozen=True)
class Node:
    name: str
    ranks: tuple[int, ...]
    facts: NodeFacts
    gauges: Gauges = field(default_factory=Gauges)


@dataclass(frozen=True)
class Kind:
    """Nodes that are alike."""

    facts: NodeFacts
    nodes: tuple[Node, ...]

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def ranks(self, places: Sequence[int]) -> list[int]:
        """Job-wide numbers of the ranks that have these places in their nodes."""
        return [node.ranks[place] for node in self.nodes for place in places]


@dataclass(frozen=True)
class Allocation:
    nodes: tuple[Node, ...]
    launcher: str = ""  # slurm, openmpi, mpich or "": who started the ranks
    launched: int = 1  # ranks that the launcher says it has started

    @property
    def size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @cached_property
    def kinds(self) -> list[Kind]:
        """The largest first."""
        found: dict[int, list[Node]] = {}  # facts of nodes that are alike are one object
        for node in self.nodes:
            found.setdefault(id(node.facts), []).append(node)
        kinds = [Kind(nodes[0].facts, tuple(nodes)) for nodes in found.values()]
        return sorted(kinds, key=lambda kind: -len(kind.nodes))

    def everyone(self) -> Iterator[tuple[Kind, int, RankFacts]]:
        """(nodes that are alike, place in them, facts of the rank there)."""
        for kind in self.kinds:
            for place, facts in enumerate(kind.facts.ranks):
                yield kind, place, facts

    @property
    def first(self) -> RankFacts:
        """Facts of rank 0."""
        return self.nodes[0].facts.ranks[0]
