r"""Two-phase I/O, planned: which rank writes or reads each block of a file, which boxes travel for that. No MPI here.

    tp = 2, columns               blocks of whole rows          rank 0            rank 1
    rank 0   rank 1               - - - - - - - - - -           owns block 0      owns block 1
    A A A  | B B B   rows 0-3     block 0  A A A B B B          has A, gets B     sends B of block 0
    A A A  | B B B   rows 4-7     block 1  A A A B B B          sends A           has B, gets A
                                                                one write each, no row written by itself

1 holders tell the dataset's planner, a rank by the hash of its name, which slabs they hold      requests
2 the planner checks that all is held once, gives each block to an owner, and tells the owner    assign, tasks
3 the owner numbers its blocks 0, 1, 2 .. in the order of the file, and tells the holders        own_blocks, errands

Each step is a list for every rank; an all-to-all of them is all the communication. A block is written or read with one
request by its owner. Reading is the same plan with "needs" for "holds", but there several or none may need an element.

Source: Thakur, Gropp, Lusk 1999, "Data sieving and collective I/O in ROMIO", section 4. There the owners' regions are
even cuts of the file; here a block goes to who has it already, so that most of the bytes never travel.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hpcllm.checkpoint.blocks import block, touching
from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, check_spec
from hpcllm.checkpoint.slabs import Slab, fits, intersection, uncovered
from hpcllm.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A box that a rank holds or needs, and which of that rank's slabs it lies in."""

    rank: int
    number: int
    box: Slab


@dataclass(frozen=True)
class Request:
    """What one rank tells the planner of a dataset."""

    name: str
    spec: DatasetSpec
    parts: tuple[Part, ...]  # whole slabs


@dataclass(frozen=True)
class OwnBlock:
    """A block that this rank writes or reads, and everyone's part of it, its own too."""

    index: int  # of the dataset's blocks
    box: Slab
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Errand:
    """A part of another rank's block."""

    turn: int  # the block's number among its owner's
    owner: int
    number: int  # of our slab
    box: Slab


@dataclass(frozen=True)
class Plan:
    """What one rank does in a transfer between all ranks and a file."""

    rank: int
    specs: Mapping[str, DatasetSpec]  # of all datasets in it
    slabs: tuple[Slab, ...]
    own: tuple[OwnBlock, ...]  # in the order of the file
    errands: tuple[tuple[Errand, ...], ...]  # of each turn, those for an owner as in its parts

    @property
    def turns(self) -> int:
        """In which this rank has something to do."""
        return max(len(self.own), len(self.errands))

    def uses(self) -> list[int]:
        """The numbers of our slabs, each as often as a part of it is used."""
        return [part.number for own in self.own for part in own.parts if part.rank == self.rank] + [
            errand.number for turn in self.errands for errand in turn
        ]

    def errands_of(self, turn: int) -> tuple[Errand, ...]:
        """None after the last turn."""
        return self.errands[turn] if turn < len(self.errands) else ()

    def stored(self, slab: Slab) -> np.dtype[Any]:
        """The element type of a slab in the file."""
        return STORED_AS[self.specs[slab.dataset].dtype]


def plan_all(asked: Sequence[tuple[Mapping[str, DatasetSpec], Sequence[Slab]]], *, exactly_once: bool) -> list[Plan]:
    """The plans of all ranks, from the specs and slabs of each: exchange.make_plan without its messages.

    Raises CheckpointError.
    """
    ranks = len(asked)
    told = [requests(specs, slabs, rank, ranks) for rank, (specs, slabs) in enumerate(asked)]
    given = [tasks(_all_told(told, rank), ranks, exactly_once=exactly_once) for rank in range(ranks)]
    own = [own_blocks(_all_told(given, rank)) for rank in range(ranks)]
    sent = [errands(own[rank], rank, ranks) for rank in range(ranks)]
    specs = {name: spec for each, _ in asked for name, spec in sorted(each.items())}
    return [Plan(r, specs, tuple(asked[r][1]), own[r], in_turn(_all_told(sent, r))) for r in range(ranks)]


def _all_told(told: Iterable[Sequence[Sequence[T]]], rank: int) -> list[T]:
    """What all ranks told one, in their order; told: of each rank, what it tells each."""
    return [one for lists in told for one in lists[rank]]


def fault_of(datasets: Mapping[str, DatasetSpec], slabs: Iterable[Slab]) -> CheckpointError | None:
    """What is wrong with one rank's request, to be raised by all ranks together; None if nothing is."""
    try:
        for name, spec in datasets.items():
            check_spec(name, spec)
        for slab in slabs:
            _check_place(slab, datasets)
    except CheckpointError as error:
        return error
    return None


def check_array(slab: Slab, array: np.ndarray, spec: DatasetSpec) -> None:
    """Raises CheckpointError for an array that is not the slab's elements as the file has them."""
    stored = STORED_AS[spec.dtype]
    if array.shape != slab.shape or array.dtype != stored or not array.flags.c_contiguous:
        raise CheckpointError(
            f"{slab} needs a C-contiguous array of {stored} and that shape, but has {array.dtype} {array.shape} "
            f"with strides {array.strides}"
        )


def requests(datasets: Mapping[str, DatasetSpec], slabs: Sequence[Slab], rank: int, ranks: int) -> list[list[Request]]:
    """Of one rank: for each rank, what it is told as a planner. A slab without elements is not told."""
    parts: dict[str, list[Part]] = {name: [] for name in datasets}
    for number, slab in enumerate(slabs):
        if slab.elements:
            parts[slab.dataset].append(Part(rank, number, slab))
    told: list[list[Request]] = [[] for _ in range(ranks)]
    for name, spec in datasets.items():
        told[_key(name) % ranks].append(Request(name, spec, tuple(parts[name])))
    return told


def tasks(asked: Iterable[Request], ranks: int, *, exactly_once: bool) -> list[list[OwnBlock]]:
    """Of one planner, from what all ranks told it: for each rank, the blocks that it is to own.

    Raises CheckpointError if ranks disagree on a dataset, or do not hold every element once where they should.
    """
    merged: dict[str, Request] = {}
    for request in asked:
        before = merged.setdefault(request.name, replace(request, parts=()))
        if before.spec != request.spec:
            raise CheckpointError(f"ranks disagree on {request.name}: {before.spec} and {request.spec}")
        merged[request.name] = replace(before, parts=before.parts + request.parts)
    told: list[list[OwnBlock]] = [[] for _ in range(ranks)]
    for name, request in merged.items():
        if exactly_once and (fault := uncovered(request.spec.shape, (part.box for part in request.parts))):
            raise CheckpointError(f"the slabs of all ranks do not make up {name} {request.spec.shape}: {fault}")
        for owner, own in assign(request):
            told[owner].append(own)
    return told


def assign(request: Request) -> Iterator[tuple[int, OwnBlock]]:
    """The owner of each block that has parts, in the order of blocks.

    It is one of those that have most of the block: at least half as much as who has the most. Blocks in a row with
    the same such ranks are shared out evenly, each rank's in one stretch; the name says who comes first, or the lowest
    rank would get all that has but one block.
    """
    blocks = list(_cut(request))
    most = [_who_has_most(own.parts) for own in blocks]
    first = _key(request.name)
    place = 0
    for ranks, group in itertools.groupby(most):
        length = len(list(group))
        for at in range(length):
            yield ranks[(first + at * len(ranks) // length) % len(ranks)], blocks[place + at]
        place += length


def own_blocks(told: Iterable[OwnBlock]) -> tuple[OwnBlock, ...]:
    """Of one owner, from what all planners told it: its blocks in the order of the file."""
    return tuple(sorted(told, key=lambda own: (own.box.dataset, own.index)))


def errands(own: Iterable[OwnBlock], rank: int, ranks: int) -> list[list[Errand]]:
    """Of one owner: for each other rank, its parts of the owner's blocks."""
    told: list[list[Errand]] = [[] for _ in range(ranks)]
    for turn, one in enumerate(own):
        for part in one.parts:
            if part.rank != rank:
                told[part.rank].append(Errand(turn, rank, part.number, part.box))
    return told


def in_turn(told: Iterable[Errand]) -> tuple[tuple[Errand, ...], ...]:
    """Of one holder, from what all owners told it, in their order: its errands by turn."""
    turns: list[list[Errand]] = []
    for errand in told:
        turns.extend([] for _ in range(errand.turn + 1 - len(turns)))
        turns[errand.turn].append(errand)
    return tuple(map(tuple, turns))


def _check_place(slab: Slab, datasets: Mapping[str, DatasetSpec]) -> None:
    if slab.dataset not in datasets:
        raise CheckpointError(f"{slab} comes without the spec of its dataset")
    spec = datasets[slab.dataset]
    if not fits(slab, spec.shape):
        raise CheckpointError(f"{slab} does not lie inside its dataset of shape {spec.shape}")


def _key(name: str) -> int:
    return zlib.crc32(name.encode())


def _cut(request: Request) -> Iterator[OwnBlock]:
    """The blocks of a dataset that have parts, ascending, each with its parts in the order of ranks."""
    shape, item_bytes = request.spec.shape, STORED_AS[request.spec.dtype].itemsize
    parts: dict[int, list[Part]] = {}
    boxes: dict[int, Slab] = {}
    for part in request.parts:
        for index in touching(part.box, shape, item_bytes):
            if index not in boxes:
                boxes[index], parts[index] = block(request.name, shape, item_bytes, index), []
            parts[index].append(Part(part.rank, part.number, intersection(part.box, boxes[index])))
    for index in sorted(boxes):
        yield OwnBlock(index, boxes[index], tuple(sorted(parts[index], key=lambda part: part.rank)))


def _who_has_most(parts: Iterable[Part]) -> tuple[int, ...]:
    elements: dict[int, int] = {}
    for part in parts:
        elements[part.rank] = elements.get(part.rank, 0) + part.box.elements
    most = max(elements.values())
    return tuple(rank for rank, count in sorted(elements.items()) if 2 * count >= most)
