"""Search the order of ranks in slots with the least bytes between nodes, then between packages; and write it.

A slot is where the launcher starts a process, node after node. An order is an array: for each slot the place, dp x pp x
tp counted with tp fastest, of the rank that runs there.

    ranks a node 4, a package 2        slot     0   1 | 2   3   #   4   5 | 6   7
    mesh.order "tp,dp,pp", 2 x 2 x 2   rank     0   1   2   3       4   5   6   7
                                       place  000 001 100 101     010 011 110 111     dp, pp, tp

    1  the order that the run has; the five other mesh orders
    2  blocks: a node holds a box of places (dp x pp x tp), a package a box of that

           dp        node 0 | node 1        2 x 2 x 1 a node instead of 4 x 1 x 1 or 1 x 4 x 1: what of each axis
        pp [][]      [][]   | [][]          crosses is weighed against the others
           [][]      [][]   | [][]

    3  of a few ranks: while exchanging two of them helps, the best exchange

A later candidate has to be better, not as good: the order of the run wins a tie, then a mesh order, which needs no
file. So the answer is never worse than what was given. Tests hold it against all ways to fill nodes with up to 9 ranks.

An option of srun, --distribution, on nodes of equal numbers of tasks:

    8 ranks, 2 a node                        node 0   node 1   node 2   node 3
    block      node after node                0 1      2 3      4 5      6 7
    cyclic     one to each node in turn       0 4      1 5      2 6      3 7
    plane=n    n to each node in turn

Ranks of a node take its slots in ascending order. tests/slurm asks a real srun. Source: srun(1), --distribution.

A rank order file of Cray MPICH, a list of ranks in the order of the slots:

    MPICH_RANK_REORDER_METHOD=3 MPICH_RANK_REORDER_FILE=FILE, by default MPICH_RANK_ORDER in the working directory
    0,1,8,9       slots 0 to 3 get ranks 0, 1, 8, 9       lines may end anywhere; # begins a comment

Slots are counted in Slurm's block distribution; what is near them, cores and the one device that each sees, is bound to
the slot (SLURM_LOCALID), whichever rank runs there. Not run by us on a Cray. Sources: LUMI training material, "Process
and thread distribution and binding" (rank reordering); ARCHER and NERSC pages on grid_order, which writes such files.
Reported of cray-mpich 9.1.0 on Perlmutter: MPI_Init fails with such files from 16 to 32 nodes on, as what its process
manager says of the placement grows past 1024 bytes. mesh.order and srun --distribution need no file. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcllm.mpi.mesh_axes import AXES
from hpcllm.plan.rank_order.traffic import Homes, Traffic
from hpcllm.system.raw_files import writing

Places = NDArray[np.int64]  # (ranks,) the place in each slot
Triple = tuple[int, int, int]  # dp, pp, tp
ORDERS = tuple(",".join(order) for order in itertools.permutations(("tp", "dp", "pp")))  # the default one first
MOST_PLACES = 2_000_000  # total size of candidates that do not fill nodes: seconds of work
MOST_EXCHANGED = 16  # ranks, up to which exchanges are tried


@dataclass(frozen=True)
class Slots:
    """Slots of a job; the last node may be part full. per_node is a multiple of per_package."""

    ranks: int
    per_node: int
    per_package: int = 1

    @property
    def nodes(self) -> Homes:
        """Node of each slot, (ranks,)."""
        return np.arange(self.ranks) // self.per_node

    @property
    def packages(self) -> Homes:
        """Package of each slot, (ranks,), counted through all nodes."""
        return np.arange(self.ranks) // self.per_package


def tiled(shape: Triple, order: str, blocks: Sequence[Triple] = ()) -> Places:
    """List places block after block, those of a block likewise, and so on; fastest axis first, as in mesh.order.

    blocks: shapes, each dividing the one before it. Without any: the places of mesh.order itself.
    """
    slowest_first = [AXES.index(axis) for axis in reversed(order.split(","))]
    places = np.arange(np.prod(shape)).reshape(shape).transpose(slowest_first)[None]
    for block in blocks:
        a, b, c = (block[axis] for axis in slowest_first)
        n, x, y, z = places.shape
        cut = places.reshape(n, x // a, a, y // b, b, z // c, c).transpose(0, 1, 3, 5, 2, 4, 6)
        places = cut.reshape(-1, a, b, c)
    return places.reshape(-1)


def homes(places: Places, of_slots: Homes, shape: Triple) -> Homes:
    """Return the home of each place, (dp, pp, tp), from that of each slot."""
    found = np.empty_like(of_slots)
    found[places] = of_slots
    return found.reshape(shape)


def rank_list(places: Places, shape: Triple, order: str) -> list[int]:
    """Return the rank in each slot, if ranks are counted in mesh.order."""
    rank_of_place = np.empty_like(places)
    rank_of_place[tiled(shape, order)] = np.arange(len(places))
    return [int(rank) for rank in rank_of_place[places]]


@dataclass(frozen=True, order=True)
class Cost:
    """Bytes a step of all kinds: between nodes, and between packages, those of different nodes included."""

    nodes: float
    packages: float


def cost(traffic: Traffic, places: Places, slots: Slots, shape: Triple) -> Cost:
    """Add up the bytes of a step that cross nodes, and packages."""
    between = (traffic.crossing(homes(places, of_slots, shape)) for of_slots in (slots.nodes, slots.packages))
    return Cost(*(round(sum(kinds.values())) for kinds in between))


@dataclass(frozen=True)
class Candidate:
    """One order of ranks in slots."""

    places: Places
    cost: Cost
    order: str = ""  # the mesh.order that gives it; empty: none does


def given_order(traffic: Traffic, slots: Slots, shape: Triple, order: str) -> Candidate:
    """Return the order that the run has: rank i in slot i."""
    places = tiled(shape, order)
    return Candidate(places, cost(traffic, places, slots, shape), order)


def best_order(traffic: Traffic, slots: Slots, shape: Triple, order: str) -> Candidate:
    """Search the best order; the given one if nothing is better."""
    starts = [given_order(traffic, slots, shape, each) for each in (order, *ORDERS)]
    blocks = (Candidate(places, cost(traffic, places, slots, shape)) for places in _in_blocks(slots, shape))
    found = min(itertools.chain(starts, blocks), key=attrgetter("cost"))  # the first of those that are as good
    if slots.ranks <= MOST_EXCHANGED:
        different = {start.cost: start for start in (found, *starts)}.values()
        found = min([found, *(_exchanged(traffic, slots, shape, start) for start in different)], key=attrgetter("cost"))
    return found


def _in_blocks(slots: Slots, shape: Triple) -> Iterator[Places]:
    """Yield boxes that fill nodes and packages; where none does, boxes of all sizes in all orders, cut as they come."""
    if slots.ranks % slots.per_node == 0:
        for block in _boxes(shape, slots.per_node):
            yield from (tiled(shape, ORDERS[0], (block, part)) for part in _boxes(block, slots.per_package))
        return
    tiles = itertools.product(ORDERS, itertools.product(*map(_divisors, shape)))
    for order, box in itertools.islice(tiles, max(1, MOST_PLACES // slots.ranks)):
        yield tiled(shape, order, [(box[0], box[1], box[2])])


def _boxes(shape: Triple, volume: int) -> list[Triple]:
    """List boxes of so many places, with sides that divide the shape's."""
    return [
        (dp, pp, volume // (dp * pp))
        for dp, pp in itertools.product(_divisors(shape[0]), _divisors(shape[1]))
        if volume % (dp * pp) == 0 and shape[2] % (volume // (dp * pp)) == 0
    ]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _exchanged(traffic: Traffic, slots: Slots, shape: Triple, found: Candidate) -> Candidate:
    """Exchange two ranks of different packages as long as that helps."""
    packages = slots.packages
    apart = [(a, b) for a, b in itertools.combinations(range(slots.ranks), 2) if packages[a] != packages[b]]

    def exchanged(pair: tuple[int, int]) -> Candidate:
        changed = found.places.copy()
        changed[list(pair)] = found.places[list(reversed(pair))]
        return Candidate(changed, cost(traffic, changed, slots, shape))

    while True:
        other = min(map(exchanged, apart), default=found, key=attrgetter("cost"))
        if not other.cost < found.cost:
            return found
        found = other


def rank_lists(slots: Slots) -> dict[str, list[int]]:
    """Return option -> the rank in each slot; none if the last node is part full, as Slurm then evens them out."""
    if slots.ranks % slots.per_node:
        return {}
    planes = [n for n in range(2, slots.per_node) if slots.per_node % n == 0]
    blocks = {"block": slots.per_node, "cyclic": 1} | {f"plane={n}": n for n in planes}
    ranks, nodes = np.arange(slots.ranks), slots.ranks // slots.per_node
    # blocks of so many ranks are dealt to the nodes in turn
    return {key: np.argsort(ranks // block % nodes, kind="stable").tolist() for key, block in blocks.items()}


def srun_distribution(traffic: Traffic, slots: Slots, shape: Triple, order: str, goal: Cost) -> str:
    """Return the first option of --distribution that costs no more than `goal`; empty: none."""
    place_of_rank = tiled(shape, order)
    for option, ranks in rank_lists(slots).items():
        if cost(traffic, place_of_rank[ranks], slots, shape) <= goal:
            return option
    return ""


def write_rank_order_file(path: Path, ranks: Sequence[int], per_node: int, about: Sequence[str]) -> None:
    """Write a line a node, below comments. Raises ConfigError."""
    nodes = [ranks[start : start + per_node] for start in range(0, len(ranks), per_node)]
    lines = [*(f"# {line}" for line in about), *(",".join(map(str, node)) for node in nodes)]
    with writing(f"the rank order file {str(path)!r}"):
        path.write_text("\n".join(lines) + "\n", encoding="ascii")
