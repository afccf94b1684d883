r"""Plan two-phase I/O: which rank writes or reads each block of a file, and which boxes travel for that. No MPI here.

    tp = 2, columns               blocks of whole rows          rank 0            rank 1
    rank 0   rank 1               - - - - - - - - - -           owns block 0      owns block 1
    A A A  | B B B   rows 0-3     block 0  A A A B B B          has A, gets B     sends B of block 0
    A A A  | B B B   rows 4-7     block 1  A A A B B B          sends A           has B, gets A
                                                                one write each, no row written by itself

1 holders tell the dataset's planner, a rank by the hash of its name, which slabs they hold     requests
2 the planner checks that all is held once, gives each block to an owner, and tells the owner   assign, assign_all
3 the owner numbers its blocks 0, 1, 2 .. in the order of the file, and tells the holders       remote_parts

Each step is (rank, what it is to be told); agreement.py delivers it. A block is written or read with one request by its
owner. Reading is the same plan with "needs" for "holds", but there several or none may need an element.

Source: Thakur, Gropp, Lusk 1999, "Data sieving and collective I/O in ROMIO", section 4. There the owners' regions are
even cuts of the file; here a block goes to who has it already, so that most of the bytes never travel.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, check_spec
from hpcllm.checkpoint.slabs import Slab, fits, intersection, stretch, uncovered
from hpcllm.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """A box that a rank holds or needs, and which of that rank's slabs it lies in."""

    rank: int
    number: int
    box: Slab


@dataclass(frozen=True)
class Request:
    """One rank's slabs of a dataset, sent to its planner."""

    name: str
    spec: DatasetSpec
    parts: tuple[Part, ...]  # whole slabs


@dataclass(frozen=True)
class BlockTask:
    """A block that its owner, this rank, writes or reads, with everyone's part of it, its own too."""

    index: int  # of the dataset's blocks
    box: Slab
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class RemotePart:
    """This rank's part of another rank's block."""

    turn: int  # the block's number among its owner's
    owner: int
    number: int  # of our slab
    box: Slab


@dataclass(frozen=True)
class Plan:
    """One rank's work in a transfer between all ranks and a file."""

    rank: int
    specs: Mapping[str, DatasetSpec]  # of all datasets in it
    slabs: tuple[Slab, ...]
    tasks: tuple[BlockTask, ...]  # in the order of the file: one a turn
    remote: tuple[tuple[RemotePart, ...], ...]  # of each turn; those for an owner in the order of its parts

    @property
    def turns(self) -> int:
        """Number of turns in which this rank has something to do."""
        return max(len(self.tasks), len(self.remote))

    def uses(self) -> list[int]:
        """The numbers of this rank's slabs, each as often as a part of it is used."""
        own = [part.number for task in self.tasks for part in task.parts if part.rank == self.rank]
        return own + [part.number for turn in self.remote for part in turn]

    def remote_in(self, turn: int) -> tuple[RemotePart, ...]:
        """This rank's parts of others' blocks of a turn; none after the last turn."""
        return self.remote[turn] if turn < len(self.remote) else ()

    def whole_in(self, task: BlockTask) -> int | None:
        """Number of this rank's slab that has all of a block in one stretch; None if none has."""
        for part in task.parts:
            is_whole = part.rank == self.rank and part.box == task.box
            if is_whole and stretch(task.box, self.slabs[part.number]) is not None:
                return part.number
        return None

    def dtype(self, slab: Slab) -> np.dtype[Any]:
        """The element type of a slab in the file."""
        return STORED_AS[self.specs[slab.dataset].dtype]


def check_slabs(specs: Mapping[str, DatasetSpec], slabs: Iterable[Slab]) -> None:
    """Raises CheckpointError for a dataset that a file cannot have, or a slab outside its dataset."""
    for name, spec in specs.items():
        check_spec(name, spec)
    for slab in slabs:
        if slab.dataset not in specs:
            raise CheckpointError(f"{slab} comes without the spec of its dataset")
        if not fits(slab, shape := specs[slab.dataset].shape):
            raise CheckpointError(f"{slab} does not lie inside its dataset of shape {shape}")


def check_array(slab: Slab, array: np.ndarray, spec: DatasetSpec) -> None:
    """Raises CheckpointError for an array that is not the slab's elements as the file has them."""
    stored = STORED_AS[spec.dtype]
    if array.shape != slab.shape or array.dtype != stored or not array.flags.c_contiguous:
        raise CheckpointError(
            f"{slab} needs a C-contiguous array of {stored} and that shape, but has {array.dtype} {array.shape} "
            f"with strides {array.strides}"
        )


def requests(
    datasets: Mapping[str, DatasetSpec], slabs: Sequence[Slab], rank: int, ranks: int
) -> Iterator[tuple[int, Request]]:
    """Make one rank's requests, each with the rank that is the planner. A slab without elements is left out."""
    parts: dict[str, list[Part]] = {name: [] for name in datasets}
    for number, slab in enumerate(slabs):
        if slab.elements:
            parts[slab.dataset].append(Part(rank, number, slab))
    for name, spec in datasets.items():
        yield _key(name) % ranks, Request(name, spec, tuple(parts[name]))


def assign_all(requests: Iterable[Request], *, exactly_once: bool) -> Iterator[tuple[int, BlockTask]]:
    """Assign all blocks of one planner's datasets: the owner of each.

    requests: of all ranks to this planner. Raises CheckpointError if ranks disagree on a dataset, or do not hold every
    element once where they should.
    """
    specs: dict[str, DatasetSpec] = {}
    parts: dict[str, list[Part]] = {}
    for request in requests:
        spec = specs.setdefault(request.name, request.spec)
        if spec != request.spec:
            raise CheckpointError(f"ranks disagree on {request.name}: {spec} and {request.spec}")
        parts.setdefault(request.name, []).extend(request.parts)
    for name, spec in specs.items():
        if exactly_once and (fault := uncovered(spec.shape, (part.box for part in parts[name]))):
            raise CheckpointError(f"the slabs of all ranks do not make up {name} {spec.shape}: {fault}")
        yield from assign(Request(name, spec, tuple(parts[name])))


def assign(request: Request) -> Iterator[tuple[int, BlockTask]]:
    """The owner of each block that has parts, in the order of blocks.

    It is one of those that have most of the block: at least half as much as who has the most. Blocks in a row with
    the same such ranks are shared out evenly, each rank's in one stretch; the name says who comes first, or the lowest
    rank would get all that has but one block.
    """
    blocks = list(_cut(request))
    most = [_who_has_most(task.parts) for task in blocks]
    first = _key(request.name)
    place = 0
    for ranks, group in itertools.groupby(most):
        length = len(list(group))
        for at in range(length):
            yield ranks[(first + at * len(ranks) // length) % len(ranks)], blocks[place + at]
        place += length


def in_file_order(tasks: Iterable[BlockTask]) -> tuple[BlockTask, ...]:
    """One owner's blocks from all planners, in the order of the file."""
    return tuple(sorted(tasks, key=lambda task: (task.box.dataset, task.index)))


def remote_parts(tasks: Iterable[BlockTask], rank: int) -> Iterator[tuple[int, RemotePart]]:
    """Tell each other rank its parts of one owner's blocks."""
    for turn, task in enumerate(tasks):
        for part in task.parts:
            if part.rank != rank:
                yield part.rank, RemotePart(turn, rank, part.number, part.box)


def by_turn(parts: Iterable[RemotePart]) -> tuple[tuple[RemotePart, ...], ...]:
    """One holder's parts, from all owners in their order, by turn."""
    turns: list[list[RemotePart]] = []
    for part in parts:
        turns.extend([] for _ in range(part.turn + 1 - len(turns)))
        turns[part.turn].append(part)
    return tuple(map(tuple, turns))


def _key(name: str) -> int:
    return zlib.crc32(name.encode())


def _cut(request: Request) -> Iterator[BlockTask]:
    """The blocks of a dataset that have parts, ascending, each with its parts in the order of ranks."""
    parts: dict[int, list[Part]] = {}
    boxes: dict[int, Slab] = {}
    for part in request.parts:
        for index in request.spec.touching(part.box):
            if index not in boxes:
                boxes[index], parts[index] = request.spec.block(request.name, index), []
            parts[index].append(Part(part.rank, part.number, intersection(part.box, boxes[index])))
    for index in sorted(boxes):
        yield BlockTask(index, boxes[index], tuple(sorted(parts[index], key=lambda part: part.rank)))


def _who_has_most(parts: Iterable[Part]) -> tuple[int, ...]:
    elements: dict[int, int] = {}
    for part in parts:
        elements[part.rank] = elements.get(part.rank, 0) + part.box.elements
    most = max(elements.values())
    return tuple(rank for rank, count in sorted(elements.items()) if 2 * count >= most)
