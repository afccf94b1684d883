"""Facts of all ranks on rank 0, and little on the way: what is equal on many nodes travels once.

    ranks of a node --> its first rank: NodeFacts, 16 bytes of their hash
    first ranks     --> rank 0: name, ranks, hash, gauges of each node     a row a node
    rank 0          --> "you": the first node with each hash               a bit a node
    those           --> rank 0: NodeFacts in full                          once for all nodes that are alike

Only rank 0 keeps something in proportion to the number of nodes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from mpi4py import MPI

from hpcllm.device import VISIBILITY
from hpcllm.hardware.node import Hardware
from hpcllm.preflight.facts import Gauges, Node, NodeFacts, RankFacts
from hpcllm.waiting import Waits

TAG = 32701
PCI = re.compile(r"|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")  # an address, or none
VISIBLE = re.compile(r"[0-9.,:* -]*")  # places in a node's list of devices


@dataclass(frozen=True)
class Crew:
    """Communicators of the preflight, this rank's place in them, and its patience. See `open_crew`."""

    world: MPI.Intracomm
    node: MPI.Intracomm  # ranks that share memory
    leaders: MPI.Intracomm  # first ranks of the nodes; COMM_NULL on the others
    waits: Waits

    @property
    def leads(self) -> bool:
        return bool(self.node.rank == 0)

    def arrive(self, what: str) -> None:
        """Return when all ranks are here. Collective over world. Raises StallError."""
        self.waits.all([self.world.Ibarrier()], lambda: f"all {self.world.size} ranks {what}")

    def free(self) -> None:
        """Collective over world."""
        if self.leaders != MPI.COMM_NULL:
            self.leaders.Free()
        self.node.Free()


def open_crew(world: MPI.Intracomm, waits: Waits) -> Crew:
    """Collective over world."""
    node = MPI.Intracomm(world.Split_type(MPI.COMM_TYPE_SHARED, world.rank))
    leaders = MPI.Intracomm(world.Split(0 if node.rank == 0 else MPI.UNDEFINED, world.rank))
    return Crew(world, node, leaders, waits)


@dataclass(frozen=True)
class Own:
    """What the first rank of a node says of its node."""

    name: str
    hardware: Hardware
    gauges: Gauges
    source: str = ""  # see NodeFacts


def gather(crew: Crew, mine: RankFacts, own: Own | None) -> list[Node]:
    """All nodes in the order of their lowest ranks, on rank 0; nothing elsewhere. Collective over crew.world.

    own: on the first rank of a node. Raises StallError.
    """
    crew.arrive("to say what they found")
    rows = crew.node.gather((crew.world.rank, mine))
    if rows is None or own is None:
        return []
    ranks = tuple(rank for rank, _ in rows)
    facts = NodeFacts(own.hardware, _numbered([found for _, found in rows]), own.source)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    table = crew.leaders.gather((own.name, ranks, digest, own.gauges))
    wanted = None
    if table is not None:
        digests = [digest for _, _, digest, _ in table]
        wanted = [digests.index(digest) == place for place, digest in enumerate(digests)]
    asked = crew.leaders.scatter(wanted)
    if table is None or wanted is None:
        if asked:
            crew.leaders.send(facts, 0, TAG)
        return []
    kinds = {digest: facts}
    for place, digest in enumerate(digests):
        if wanted[place] and place:
            kinds[digest] = crew.leaders.recv(source=place, tag=TAG)
    return [Node(name, ranks, kinds[digest], gauges) for name, ranks, digest, gauges in table]


def _numbered(ranks: list[RankFacts]) -> tuple[RankFacts, ...]:
    """Devices that are told apart by numbers of their own get small ones, so that nodes that are alike are equal."""
    addresses = (rank.device.address for rank in ranks if rank.device)
    own = list(dict.fromkeys(address for address in addresses if not PCI.fullmatch(address)))
    found = []
    for rank in ranks:
        if rank.device and rank.device.address in own:
            name = f"number {own.index(rank.device.address)} of the node"
            rank = replace(rank, device=replace(rank.device, identity=name, address=""))
        rest = (name for name, value in rank.environment if name in VISIBILITY and not VISIBLE.fullmatch(value))
        hidden = dict.fromkeys(rest, "(by their own numbers)")
        found.append(replace(rank, environment=tuple((k, hidden.get(k, v)) for k, v in rank.environment)))
    return tuple(found)
