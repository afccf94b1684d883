"""Parts of blocks travel: from those who hold them to the owners who write, from the owners who read to all in need.

    turn k of rank r      write                                        read
    AHEAD of it           receive others' parts of my k-th block       receive my parts of all owners' k-th blocks
                          send my parts of all owners' k-th blocks
    in its turn           wait for my k-th block, take it              read my k-th block, send everyone's parts of it

Free of deadlock, by induction over k: what a rank waits for in turn k, its peers send before they wait for anything of
turn k. A message is a block at most, 4 MiB. Messages and memory of WINDOW turns exist at a time: of own blocks one a
turn; of others', one part for each owner who has something of ours in its k-th block, with memory aside only where that
part has gaps. In writing these are few; a rank that reads all of a tp shard may meet every owner in one turn, and then
has up to its gapped slabs aside.

A block that lies in one stretch in a slab is not copied: it is written from there, or read into it. A rank whose disk
or source fails goes on exchanging, so that nobody waits for it, and raises when the exchange is over.
Works without MPI: comm=None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpcllm.checkpoint import plan as planning
from hpcllm.checkpoint.layout import DatasetSpec, as_bytes
from hpcllm.checkpoint.messages import Arrays, FirstError, Messages, Placed
from hpcllm.checkpoint.plan import OwnBlock, Plan
from hpcllm.checkpoint.slabs import Slab, stretch
from hpcllm.errors import CheckpointError
from hpcllm.together import raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
WINDOW = 4  # turns of which messages and memory exist
AHEAD = 2  # turns by which messages are started early


def make_plan(
    comm: MPI.Intracomm | None, specs: Mapping[str, DatasetSpec], slabs: Sequence[Slab], *, exactly_once: bool
) -> Plan:
    """Agree on who writes or reads which block. Collective over comm.

    specs: of at least the datasets of this rank's slabs. exactly_once: the slabs of all ranks hold every element of
    every dataset once, as in writing; the plan's specs are then those of all ranks. Raises CheckpointError on all.
    """
    raise_together(comm, planning.fault_of(specs, slabs))
    used = {slab.dataset for slab in slabs}
    told = {name: spec for name, spec in specs.items() if exactly_once or name in used}
    if comm is None:
        return planning.plan_all([(told, slabs)], exactly_once=exactly_once)[0]
    asked = _all_to_all(comm, planning.requests(told, slabs, comm.rank, comm.size))
    tasks: list[list[OwnBlock]] = []
    error = None
    try:
        tasks = planning.tasks(asked, comm.size, exactly_once=exactly_once)
    except CheckpointError as fault:
        error = fault
    raise_together(comm, error)
    own = planning.own_blocks(_all_to_all(comm, tasks))
    errands = planning.in_turn(_all_to_all(comm, planning.errands(own, comm.rank, comm.size)))
    if exactly_once:
        merged = comm.allgather({request.name: request.spec for request in asked})
        told = {name: spec for each in merged for name, spec in each.items()}
    return Plan(comm.rank, dict(sorted(told.items())), tuple(slabs), own, errands)


def to_owners(
    plan: Plan,
    comm: MPI.Intracomm | None,
    array_of: Callable[[Slab], np.ndarray],
    take: Callable[[Slab, int, memoryview], None],
) -> None:
    """Hand each block, gathered from all who hold parts of it, to its owner's `take`. Collective over comm.

    array_of: a C-contiguous array of the stored type, in the slab's shape; asked for once, and kept from the first turn
    that needs it to the last. take(block, its index in its dataset, its bytes): called for this rank's blocks in the
    order of the file, until something goes wrong. What array_of or take raises, this rank alone raises, at the end.
    """
    first, window = FirstError(), _window(comm)
    arrays = Arrays(plan.slabs, plan.uses(), array_of, first)
    blocks: dict[int, Placed] = {}  # that are put together, by turn
    for turn in range(-AHEAD, plan.turns):
        coming, messages = turn + AHEAD, window[(turn + AHEAD) % WINDOW]
        messages.settle()
        if coming < len(plan.own) and _home(plan, plan.own[coming]) is None:
            blocks[coming] = _expect(plan, plan.own[coming], messages)
        for errand in plan.errands_of(coming):
            source = arrays.use(errand.number) or messages.memory.array(errand.box, plan.stored(errand.box))
            messages.send(source, errand.box, errand.owner)
        if 0 <= turn < len(plan.own):
            own = plan.own[turn]
            values = _gathered(plan, own, blocks.pop(turn, None), arrays, window[turn % WINDOW])
            if values is not None and not first.error:
                with first:
                    take(own.box, own.index, as_bytes(values))
    _end(window, first)


def from_owners(
    plan: Plan,
    comm: MPI.Intracomm | None,
    give: Callable[[Slab, memoryview], None],
    array_of: Callable[[Slab], np.ndarray],
) -> None:
    """Fill all slabs with what `give` reads of each block, once, at its owner. Collective over comm.

    give(block, memory to fill): called for this rank's blocks in the order of the file. array_of: the array to be
    filled, as in to_owners. What they raise, this rank alone raises, at the end; others have then got anything, so
    agree before the arrays are used.
    """
    first, window = FirstError(), _window(comm)
    arrays = Arrays(plan.slabs, plan.uses(), array_of, first)
    for turn in range(-AHEAD, plan.turns):
        coming, messages = turn + AHEAD, window[(turn + AHEAD) % WINDOW]
        messages.settle()
        for errand in plan.errands_of(coming):
            target = arrays.use(errand.number) or messages.memory.array(errand.box, plan.stored(errand.box))
            messages.receive(target, errand.box, errand.owner)
        if 0 <= turn < len(plan.own):
            _scatter(plan, plan.own[turn], give, arrays, window[turn % WINDOW], first)
    _end(window, first)


def _home(plan: Plan, own: OwnBlock) -> int | None:
    """Which of our slabs has all of our block in one stretch."""
    for part in own.parts:
        if part.rank == plan.rank and part.box == own.box and stretch(own.box, plan.slabs[part.number]) is not None:
            return part.number
    return None


def _expect(plan: Plan, own: OwnBlock, messages: Messages) -> Placed:
    """Memory for a block of ours; what others have of it is on its way there."""
    block = messages.memory.array(own.box, plan.stored(own.box))
    for part in own.parts:
        if part.rank != plan.rank:
            messages.receive(block, part.box, part.rank)
    return block


def _gathered(plan: Plan, own: OwnBlock, block: Placed | None, arrays: Arrays, messages: Messages) -> np.ndarray | None:
    """All of a block of ours; None if our own part of it cannot be had."""
    messages.arrived()
    mine = [(part, arrays.use(part.number)) for part in own.parts if part.rank == plan.rank]
    if block is None:
        return next((source.in_one_stretch(own.box) for _, source in mine if source), None)
    for part, source in mine:
        if source:
            block.part(part.box)[...] = source.part(part.box)
    return block.array


def _scatter(
    plan: Plan,
    own: OwnBlock,
    give: Callable[[Slab, memoryview], None],
    arrays: Arrays,
    messages: Messages,
    first: FirstError,
) -> None:
    """Read a block of ours, into our slab if it has room for it in one stretch, and give everyone their parts."""
    mine = {part.number: arrays.use(part.number) for part in own.parts if part.rank == plan.rank}
    home = _home(plan, own)
    target = mine.pop(home) if home is not None else None
    values = target.in_one_stretch(own.box) if target else None
    block = messages.memory.array(own.box, plan.stored(own.box)) if values is None else Placed(values, own.box)
    with first:
        give(own.box, as_bytes(block.array))
    for part in own.parts:
        if part.rank != plan.rank:
            messages.send(block, part.box, part.rank)
        elif target := mine.get(part.number):
            target.part(part.box)[...] = block.part(part.box)


def _window(comm: MPI.Intracomm | None) -> list[Messages]:
    if not comm:
        return [Messages(None, None) for _ in range(WINDOW)]
    from hpcllm.together import REPORT_LIMIT_S
    from hpcllm.waiting import Waits

    waits = Waits(REPORT_LIMIT_S)
    return [Messages(comm, waits) for _ in range(WINDOW)]


def _end(window: list[Messages], first: FirstError) -> None:
    for messages in window:
        messages.settle()
    if first.error:
        raise first.error


def _all_to_all(comm: MPI.Intracomm, lists: Sequence[Sequence[T]]) -> list[T]:
    """What all ranks tell this one, in their order; lists: what it tells each."""
    return [one for told in comm.alltoall(lists) for one in told]
